"""The operators against slow, plain restatements, and as ONNX against themselves in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from eagle_export.graphs.export import export_graph
from eagle_export.models import ops
from eagle_run.backends.onnxruntime import OnnxRuntimeGraph
from eagle_run.errors import EagleError

torch.set_num_threads(1)
B, HQ, HKV, T, S, KV, DH = 2, 6, 2, 4, 12, 9, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_mask(seed: int = 3) -> Tensor:
    mask = draw(B, 1, T, KV, seed=seed) > 0
    mask[..., 0] = True  # every row sees something
    return mask


def test_attention_is_softmax_over_what_the_mask_shows() -> None:
    q, k, v, mask = (
        draw(B, HQ, T, DH),
        draw(B, HKV, S, DH, seed=1),
        draw(B, HKV, S, DH, seed=2),
        random_mask(),
    )
    found = ops.attention(q, k, v, mask, 0.3)
    for b in range(B):
        for h in range(HQ):
            group = h * HKV // HQ  # consecutive query heads share a key head
            for t in range(T):
                shown = [j for j in range(KV) if mask[b, 0, t, j]]
                scores = [math.exp(0.3 * float(q[b, h, t] @ k[b, group, j])) for j in shown]
                want = sum(w * v[b, group, j] for w, j in zip(scores, shown, strict=True)) / sum(scores)
                torch.testing.assert_close(found[b, h, t], want)


def test_attention_ignores_the_cache_beyond_the_mask() -> None:
    q, k, v, mask = (
        draw(B, HQ, T, DH),
        draw(B, HKV, S, DH, seed=1),
        draw(B, HKV, S, DH, seed=2),
        random_mask(),
    )
    before = ops.attention(q, k, v, mask, 0.3)
    k[:, :, KV:], v[:, :, KV:] = torch.nan, torch.nan
    assert torch.equal(ops.attention(q, k, v, mask, 0.3), before)


def test_cache_update_writes_in_place_at_each_sequences_own_row() -> None:
    cache, new, index = draw(B, HKV, S, DH), draw(B, HKV, T, DH, seed=1), torch.tensor([S - T, 3])
    want = cache.clone()
    for b in range(B):
        for t in range(T):
            want[b, :, int(index[b]) + t] = new[b, :, t]
    found = ops.cache_update(cache, new, index)
    assert found is cache
    assert torch.equal(found, want)


def test_rms_norm() -> None:
    x, weight = draw(3, 5, 16), draw(16, seed=1)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-2), want.float())


@pytest.mark.parametrize("rotated", [DH, DH - 2])
def test_rotary_turns_pairs_of_channels(rotated: int) -> None:
    x, angle = draw(B, HQ, T, DH), draw(B, T, rotated // 2, seed=1)
    want = x.clone()
    half = rotated // 2
    for i in range(half):
        turn = torch.polar(torch.ones(B, 1, T), angle[:, None, :, i])
        both = torch.complex(x[..., i], x[..., half + i]) * turn
        want[..., i], want[..., half + i] = both.real, both.imag
    torch.testing.assert_close(ops.rotary(x, angle.cos(), angle.sin()), want)


def test_gather_rows() -> None:
    h, index = draw(B, T, 5), torch.tensor([[3, 3, 0], [1, 2, 0]])
    found = ops.gather_rows(h, index)
    assert all(torch.equal(found[b, r], h[b, index[b, r]]) for b in range(B) for r in range(3))


def test_operators_are_differentiable() -> None:
    inputs = [draw(B, HQ, T, DH), draw(B, HKV, T, DH, seed=1), draw(B, HKV, T, DH, seed=2), draw(16, seed=4)]
    for tensor in inputs:
        tensor.requires_grad_()
    q, k, v, weight = inputs
    angle = draw(B, T, DH // 2, seed=5)
    mask = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    out = ops.attention(ops.rotary(q, angle.cos(), angle.sin()), k, v, mask, 0.3)
    out = ops.rms_norm(ops.linear(out.reshape(B, T, HQ * DH), draw(16, HQ * DH)), weight, 1e-5)
    ops.gather_rows(out, torch.zeros(B, 1, dtype=torch.int64)).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in inputs)


class Everything(nn.Module):
    """All operators once, each with an output of its own. `rotated` channels of each head are turned."""

    def __init__(self, rotated: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(16, seed=6).to(dtype))
        self.matrix = nn.Parameter(draw(5, 16, seed=7).to(dtype))
        self.bias = nn.Parameter(draw(5, seed=8).to(dtype))
        self.register_buffer("angle", draw(1, 1, rotated // 2, seed=9))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, new, mask, write, index, x, past = inputs
        angle = self.angle.expand(q.shape[0], q.shape[2], -1)
        present = ops.cache_update(past, new, write)
        turned = ops.rotary(q, angle.cos(), angle.sin())
        return (
            turned,
            ops.attention(turned, present, present, mask, 0.3),
            ops.rms_norm(x, self.weight, 1e-3),
            ops.linear(x, self.matrix, self.bias),
            ops.gather_rows(x, index),
            present,
        )


OUTPUTS = ("turned", "attended", "normed", "product", "picked", "present_key.0")


@pytest.mark.parametrize(
    ("dtype", "rotated"), [(torch.float32, DH), (torch.float32, DH - 2), (torch.float16, DH)]
)
def test_onnx_equals_torch(dtype: torch.dtype, rotated: int, tmp_path: Path) -> None:
    module = Everything(rotated, dtype)

    def inputs(batch: int, rows: int, kv: int, seed: int) -> dict[str, Tensor]:
        mask = draw(batch, 1, rows, kv, seed=seed) > 0
        mask[..., 0] = True
        return {
            "q": draw(batch, HQ, rows, DH, seed=seed).to(dtype),
            "new": draw(batch, HKV, rows, DH, seed=seed + 1).to(dtype),
            "tree_mask": mask,
            "write_index": torch.arange(batch) + 2,
            "logits_index": torch.arange(2).expand(batch, 2).contiguous() % rows,
            "x": draw(batch, rows, 16, seed=seed + 2).to(dtype),
            "past_key.0": draw(batch, HKV, S, DH, seed=seed + 3).to(dtype),
        }

    dynamic = {
        "q": {0: "B", 2: "T"},
        "new": {0: "B", 2: "T"},
        "tree_mask": {0: "B", 2: "T", 3: "KV"},
        "write_index": {0: "B"},
        "logits_index": {0: "B", 1: "R"},
        "x": {0: "B", 1: "T"},
        "past_key.0": {0: "B"},
    }
    path = tmp_path / "draft.onnx"
    export_graph(module, inputs(2, 3, 5, 0), OUTPUTS, dynamic, path, name="draft")
    onnx.checker.check_model(str(path), full_check=True)
    graph = OnnxRuntimeGraph(path, "draft", threads=1)
    for batch, rows, kv in ((1, 1, 4), (3, 4, 9)):
        feeds = inputs(batch, rows, kv, 20)
        with torch.no_grad():
            want = module(*(tensor.clone() for tensor in feeds.values()))
        found = {name: torch.full_like(tensor, torch.nan) for name, tensor in zip(OUTPUTS, want, strict=True)}
        found["present_key.0"] = feeds["past_key.0"]
        graph.bind(feeds | found)()
        for name, tensor in zip(OUTPUTS, want, strict=True):
            tolerance = 1e-5 if dtype == torch.float32 else 5e-3
            torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=tolerance)


class Apply(nn.Module):
    """`function` of the input times a weight."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(draw(4, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def written_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] += 1.0
    return y.mul_(2.0) + x


@pytest.mark.parametrize(
    "function",
    [
        torch.square,  # the exporter has no translation, only a decomposition
        written_in_place,
        lambda x: x.half().float(),
        lambda x: x.to(x.dtype) + 1.0,
        lambda x: torch.nn.functional.silu(x).reshape(-1, 2, 2).flatten(1),
    ],
)
def test_any_module_keeps_its_meaning(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """The exporter's decompositions are left out where a graph does not need them, and only there."""
    module, path = Apply(function), tmp_path / "fuse.onnx"
    export_graph(module, {"features": draw(2, 4)}, ["hidden"], {"features": {0: "B"}}, path, name="fuse")
    onnx.checker.check_model(str(path), full_check=True)
    x, found = draw(5, 4, seed=2), torch.full((5, 4), torch.nan)
    OnnxRuntimeGraph(path, "fuse", threads=1).bind({"features": x, "hidden": found})()
    with torch.no_grad():
        torch.testing.assert_close(found, module(x))


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"fuse graph could not be traced.*hypot"):
        export_graph(
            Apply(lambda x: torch.hypot(x, x)),
            {"features": draw(2, 4)},
            ["hidden"],
            {"features": {0: "B"}},
            tmp_path / "fuse.onnx",
            name="fuse",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("heads", "rows"), [(HQ, T), (HQ, 1), (HKV, T)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_attention_folded_for_a_gpu_is_attention(
    heads: int, rows: int, dtype: torch.dtype, close: float
) -> None:
    """The form that fused kernels take, against the plain one, here both on the CPU."""
    q = draw(B, heads, rows, DH).to(dtype)
    k, v = draw(B, HKV, S, DH, seed=1).to(dtype), draw(B, HKV, S, DH, seed=2).to(dtype)
    mask = random_mask()[:, :, :rows]
    want = ops.attention(q, k, v, mask, 0.3)
    found = ops.attention(q, k, v, ops.attention_bias(mask, heads // HKV, dtype), 0.3)
    assert found.shape == want.shape
    torch.testing.assert_close(found, want, rtol=close, atol=close)


def test_cache_rows_may_be_worked_out_beforehand() -> None:
    new, index = draw(B, HKV, T, DH, seed=1), torch.tensor([S - T, 3])
    want = ops.cache_update(draw(B, HKV, S, DH), new, index)
    assert torch.equal(ops.cache_update(draw(B, HKV, S, DH), new, ops.cache_rows(index, T)), want)


def test_rotation_in_few_kernels_is_rotation() -> None:
    x, angle = draw(B, T, HQ, DH).transpose(1, 2), draw(B, T, DH // 2, seed=1)
    want = ops._rotary(x, angle.cos(), angle.sin())
    torch.testing.assert_close(ops._rotary_in_place(x, angle.cos(), angle.sin()), want)


def test_operators_do_without_onnx() -> None:
    """The eager backend runs where only torch and Transformers are installed."""
    import subprocess
    import sys

    code = "import sys, eagle_export.reference.eager, eagle_export.models.head, eagle_export.models.target\n"
    code += "print({'onnx', 'onnxscript', 'onnx_ir'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
