"""The eager backend's form for a GPU, on one: against its plain form on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_export.models import ops
from eagle_run.dtypes import DTYPES

pytestmark = pytest.mark.gpu

B, HQ, HKV, T, S, KV, DH = 2, 8, 2, 5, 96, 64, 64
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rows", [1, T])
def test_attention(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    q, k, v = draw(B, HQ, rows, DH, seed=0), draw(B, HKV, S, DH, seed=1), draw(B, HKV, S, DH, seed=2)
    mask = draw(B, 1, rows, KV, seed=3) > 0
    mask[..., 0] = True
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    want = ops.attention(q.float(), k.float(), v.float(), mask, DH**-0.5)
    bias = ops.attention_bias(mask.to(device), HQ // HKV, dtype)
    found = ops.attention(q.to(device), k.to(device), v.to(device), bias, DH**-0.5)
    torch.testing.assert_close(found.float().cpu(), want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_norm_and_rotation(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, angle = draw(B, T, HQ, DH, seed=0), draw(DH, seed=1), draw(B, T, DH // 2, seed=2)
    x, weight = x.to(dtype).transpose(1, 2), weight.to(dtype)
    for found, want in (
        (ops.rms_norm(x.to(device), weight.to(device), 1e-5), ops.rms_norm(x.float(), weight.float(), 1e-5)),
        (
            ops.rotary(x.to(device), angle.cos().to(device), angle.sin().to(device)),
            ops.rotary(x.float(), angle.cos(), angle.sin()),
        ),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float().cpu(), want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("name", ["target", "draft"])
def test_graphs_give_what_they_give_on_a_cpu(setup: Any, device: torch.device, name: str) -> None:
    from benchmarks.gpu_models import random_model

    cpu = random_model("tiny", torch.device("cpu"), max_seq_len=128, chunk=16, rows=48, dtype=torch.float32)
    gpu_module, cpu_module = setup.graphs[name]._module, cpu.setup.graphs[name]._module
    cpu_module.load_state_dict(gpu_module.state_dict())
    graph = setup.graphs[name]
    sizes = {"B": 2, "T": 3, "R": 3, "KV": 32}
    there: dict[str, torch.Tensor] = {}
    for seed, spec in enumerate((*graph.spec.inputs, *graph.spec.outputs)):
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        tensor = draw(*shape, seed=seed).to(DTYPES[spec.dtype].torch)
        there[spec.name] = there.get(spec.name.replace("present", "past"), tensor)
    there["tree_mask"].copy_((torch.arange(32) <= 9 + torch.arange(3)[:, None]).expand(2, 1, -1, -1))
    there["write_index"].copy_(torch.tensor([9, 4]))
    there["input_ids"].copy_(torch.tensor([[5, 6, 7], [1, 2, 3]]))
    there["position_ids"].copy_(torch.tensor([[9, 10, 11], [4, 5, 5]]))
    there["logits_index"].copy_(torch.arange(3).expand(2, -1))
    here: dict[str, torch.Tensor] = {}
    for key, tensor in there.items():
        here[key] = here[key.replace("present", "past")] if key.startswith("present") else tensor.to(device)
    cpu.setup.graphs[name].bind(there)()
    graph.bind(here)()
    for key, tensor in there.items():
        torch.testing.assert_close(here[key].cpu(), tensor, rtol=1e-3, atol=1e-3)
