"""EagerGraph keeps the Graph protocol: bound tensors in and out, caches in place, wrong bindings refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.headmaker import RECIPES, make_head
from support.targetmaker import ROWS, make_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_export.graphs.draft import export_draft
from eagle_export.graphs.fuse import export_fuse
from eagle_export.heads.load import load_head
from eagle_export.models.head import build_head
from eagle_export.models.target import TargetModule
from eagle_export.reference.eager import EagerGraph, draft_graph, fuse_graph, target_graph
from eagle_run.backends.base import Graph
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.dtypes import DTYPES
from eagle_run.errors import EagleError

torch.set_num_threads(1)


class Count(nn.Module):
    """sum of the first input and of a cache to which it is added in place."""

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        past += x
        return x + past, past


SPEC = GraphSpec(
    "draft",
    (TensorSpec("x", "float32", ("B", 2)), TensorSpec("past_key.0", "float32", ("B", 2))),
    (TensorSpec("y", "float32", ("B", 2)), TensorSpec("present_key.0", "float32", ("B", 2))),
)


def bindings(batch: int = 3) -> dict[str, Tensor]:
    cache = torch.zeros(batch, 2)
    return {
        "x": torch.ones(batch, 2),
        "past_key.0": cache,
        "y": torch.zeros(batch, 2),
        "present_key.0": cache,
    }


def test_run_reads_inputs_and_writes_outputs_each_time() -> None:
    tensors = bindings()
    run = EagerGraph(Count(), SPEC).bind(tensors)
    assert tensors["y"].sum() == 0  # binding alone runs nothing
    run()
    assert torch.equal(tensors["y"], torch.full((3, 2), 2.0))
    tensors["x"].fill_(5.0)
    run()
    assert torch.equal(tensors["past_key.0"], torch.full((3, 2), 6.0))
    assert torch.equal(tensors["y"], torch.full((3, 2), 11.0))


def test_outputs_carry_no_gradient() -> None:
    layer = nn.Linear(2, 2)
    spec = GraphSpec("fuse", SPEC.inputs[:1], SPEC.outputs[:1])
    tensors = {"x": torch.ones(3, 2), "y": torch.zeros(3, 2)}
    EagerGraph(layer, spec).bind(tensors)()
    assert not tensors["y"].requires_grad
    torch.testing.assert_close(tensors["y"], layer(tensors["x"]).detach())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"y": None}, "y"),
        ({"other": torch.zeros(1)}, "other"),
        ({"x": torch.ones(3, 2, dtype=torch.float64)}, "float32"),
        ({"x": torch.ones(3, 3)}, "x"),
        ({"y": torch.zeros(4, 2)}, "B"),
    ],
)
def test_wrong_bindings_are_refused(change: dict[str, Tensor | None], reason: str) -> None:
    tensors = {name: tensor for name, tensor in (bindings() | change).items() if tensor is not None}
    with pytest.raises(EagleError, match=reason):
        EagerGraph(Count(), SPEC).bind(tensors)


@pytest.mark.parametrize("kind", ["eagle3-specforge", "eagle1-bias"])
def test_head_graphs_have_the_signature_of_the_exported_ones(kind: str, tmp_path: Path) -> None:
    head = make_head(RECIPES[kind])
    fuse, draft = build_head(
        load_head(head.write(tmp_path / "head"), head.target), head.embedding, head.lm_head
    )
    assert draft_graph(draft, ROWS).spec == export_draft(draft, tmp_path / "draft.onnx", cache_rows=ROWS)
    if fuse is not None:
        assert fuse_graph(fuse).spec == export_fuse(fuse, tmp_path / "fuse.onnx")


def fake_bindings(graph: Graph) -> dict[str, Tensor]:
    sizes = {"B": 2, "T": 3, "R": 2, "KV": 8}
    tensors: dict[str, Any] = {}
    for tensor in (*graph.spec.inputs, *graph.spec.outputs):
        shape = [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
        past = tensor.name.replace("present", "past")
        tensors[tensor.name] = tensors.get(past, torch.zeros(shape, dtype=DTYPES[tensor.dtype].torch))
    return tensors


def test_all_three_graphs_run_on_fake_tensors(tmp_path: Path) -> None:
    """No host read and no data-dependent shape: under FakeTensorMode either would raise."""
    head = make_head(RECIPES["eagle3-specforge"])
    loaded = load_head(head.write(tmp_path / "head"), head.target)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fuse, draft = build_head(loaded, head.embedding, head.lm_head)
        assert fuse is not None
        target = TargetModule(make_model("llama"), (1,))
        for graph in (target_graph(target, ROWS), fuse_graph(fuse), draft_graph(draft, ROWS)):
            graph.bind(fake_bindings(graph))()


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_worked_out_once_a_forward_changes_nothing(rows: int, tmp_path: Path) -> None:
    """The form for a GPU against the plain one, for grouped heads: outputs and caches, target and draft."""
    head = make_head(RECIPES["eagle3-specforge"])
    _, draft = build_head(load_head(head.write(tmp_path / "head"), head.target), head.embedding, head.lm_head)
    target = TargetModule(make_model("llama"), (1,))
    for make in (
        lambda fused: target_graph(target, ROWS, fused=fused),
        lambda fused: draft_graph(draft, ROWS, fused=fused),
    ):
        found = []
        for fused in (False, True):
            graph = make(fused)
            tensors = random_bindings(graph, rows)
            graph.bind(tensors)()
            found.append(tensors)
        for name, want in found[0].items():
            torch.testing.assert_close(found[1][name], want, rtol=1e-5, atol=1e-5)


def random_bindings(graph: EagerGraph, rows: int) -> dict[str, Tensor]:
    sizes = {"B": 2, "T": rows, "R": 1, "KV": 8}
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for spec in (*graph.spec.inputs, *graph.spec.outputs):
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        tensor = torch.randn(shape, generator=generator).to(DTYPES[spec.dtype].torch)
        tensors[spec.name] = tensors.get(spec.name.replace("present", "past"), tensor)
    columns = torch.arange(8) <= 4 + torch.arange(rows)[:, None]  # [T, KV]
    tensors["tree_mask"].copy_(columns.expand(2, 1, -1, -1))
    tensors["write_index"].copy_(torch.tensor([4, 2]))
    for name in ("input_ids", "position_ids", "logits_index"):
        tensors[name].zero_()
    return tensors
