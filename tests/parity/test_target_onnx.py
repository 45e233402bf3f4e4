"""target.onnx in ONNX Runtime against the eager module and Transformers, and what the file looks like."""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from support.familymaker import WINDOW
from support.targetmaker import KINDS, LAYERS, ROWS, Runner, assert_rows, make_model, path_of, tokens_of
from torch import Tensor, nn

from eagle_export.graphs.check import check_file
from eagle_export.graphs.export import export_as, export_graph
from eagle_export.graphs.target import export_target
from eagle_export.models.target import TargetModule
from eagle_export.reference.eager import target_graph
from eagle_run.backends.onnxruntime import OnnxRuntimeGraph
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.errors import EagleError

Exported = Callable[[str], Any]
PARENTS = (-1, 0, 0, 1, 1, 2, 5)


def runner(path: Path, batch: int) -> Runner:
    return Runner(OnnxRuntimeGraph(path, "target", threads=1), batch)


@pytest.mark.parametrize("kind", KINDS)
def test_graph_equals_eager_and_transformers(kind: str, exported: Exported) -> None:
    """Prefill in chunks, one token, and a tree, for two sequences of different length in one batch."""
    target = exported(kind)
    graph = runner(target.path, 2)
    eager = Runner(target_graph(target.module, ROWS), 2)
    prefixes = [tokens_of(10, seed=2), tokens_of(4, seed=3)]
    trees = [tokens_of(len(PARENTS), seed=5), tokens_of(len(PARENTS), seed=6)]

    def story(run: Runner) -> list[tuple[Tensor, Tensor]]:
        return [
            run.extend([prefixes[0][:3], prefixes[1][:3]], [0, 0]),
            run.extend([prefixes[0][3:9], tokens_of(6, seed=4)], [3, 3]),
            run.extend([prefixes[0][9:], prefixes[1][3:]], [9, 3]),  # the second one starts over at row 3
            run.tree(trees, PARENTS, [10, 4]),
        ]

    seen = story(graph)
    for found, want in zip(seen, story(eager), strict=True):
        torch.testing.assert_close(found[0], want[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(found[1], want[1], atol=1e-4, rtol=0)
    expected = {
        (b, node): prefixes[b] + [trees[b][i] for i in path_of(PARENTS, node)]
        for b in range(2)
        for node in range(len(PARENTS))
    }
    assert_rows(target.model, target.module.feature_layers, seen[-1], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "atol"),
    [
        ("llama", 2e-5),
        ("qwen3", 2e-5),
        ("qwen3-moe", 2e-5),
        ("gemma3", 2e-5),
        ("gpt-oss", 2e-5),
        ("llama4", 2e-5),
        ("llama-fp16", 1e-2),
        ("qwen3-fp16", 1e-2),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(kind: str, atol: float, exported: Exported) -> None:
    """Verification is exact only if a node's logits are the same alone and in any tree around it."""
    target = exported(kind)
    prefix, tree = tokens_of(8, seed=11), tokens_of(len(PARENTS), seed=12)
    together = runner(target.path, 1)
    together.extend([prefix], [0])
    logits, features = together.tree([tree], PARENTS, [8])
    for node in range(len(PARENTS)):
        path = path_of(PARENTS, node)
        alone = runner(target.path, 1)
        alone.extend([prefix], [0])
        for depth, other in enumerate(path):
            one_logits, one_features = alone.extend([[tree[other]]], [8 + depth])
        torch.testing.assert_close(logits[0, node], one_logits[0, 0], atol=atol, rtol=0)
        torch.testing.assert_close(features[0, node], one_features[0, 0], atol=atol, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_file_is_standard_and_whole(kind: str, exported: Exported) -> None:
    target = exported(kind)
    check_file(target.path, target.spec)
    model = onnx.load(target.path, load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""}
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert not model.functions
    data = target.path.with_name("target.onnx.data")
    for file in (target.path, data):
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o644
    # Every weight is there once, a tied embedding too; small constants may live in the graph.
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters() if p.dim() >= 2)
    assert weights <= data.stat().st_size < weights + 4096 * len(list(target.model.parameters()))


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_nodes_are_few(kind: str, exported: Exported) -> None:
    """One operator for each thing that compilers know as one, merged projections, no shape arithmetic."""
    target = exported(kind)
    count = Counter(node.op_type for node in onnx.load(target.path, load_external_data=False).graph.node)
    norms = 4 if kind == "qwen3" else 2
    assert count["Attention"] == LAYERS
    assert count["TensorScatter"] == count["RotaryEmbedding"] == 2 * LAYERS
    assert count["RMSNormalization"] == norms * LAYERS + 1
    assert count["MatMul"] == 4 * LAYERS + 1  # q+k+v, o, gate+up, down; lm_head
    assert count["Transpose"] == 4 * LAYERS + (kind == "llama-tied")  # heads and rows change places
    assert count["Shape"] == 1  # the width of the mask
    assert count["Pow"] + count["ReduceMean"] + count["Expand"] + count["Where"] == 0


@pytest.mark.parametrize("kind", ["mistral-window", "gemma3"])
def test_no_window_in_a_graph_whose_sequences_are_shorter(kind: str, tmp_path: Path) -> None:
    """And its features: what a layer gets, and the last layer's output before the final norm."""
    model, path = make_model(kind), tmp_path / "target.onnx"
    module = TargetModule(model, (1, LAYERS + 1), max_seq_len=WINDOW).eval()
    export_target(module, path, cache_rows=ROWS)
    nodes = onnx.load(path, load_external_data=False).graph.node
    assert [node.input[3] for node in nodes if node.op_type == "Attention"] == ["tree_mask"] * LAYERS
    assert not {"Less", "And", "Where"} & {node.op_type for node in nodes}
    tokens = tokens_of(WINDOW, seed=17)
    want = Runner(target_graph(TargetModule(model, (1, LAYERS + 1)), ROWS), 1).extend([tokens], [0])
    for found, expected in zip(runner(path, 1).extend([tokens], [0]), want, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_weights_are_named_as_in_the_checkpoint(exported: Exported) -> None:
    target = exported("llama")
    names = {tensor.name for tensor in onnx.load(target.path, load_external_data=False).graph.initializer}
    layer = "model.layers.0.self_attn"
    assert "+".join(f"{layer}.{part}_proj.weight.T" for part in "qkv") in names
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight.T"} <= names


def test_half_precision_attends_in_float32(tmp_path: Path) -> None:
    model = make_model("qwen3").half()
    module = TargetModule(model, (1,)).eval()
    path = tmp_path / "target.onnx"
    spec = export_target(module, path, cache_rows=ROWS)
    check_file(path, spec)
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
    attention = [node for node in graph.node if node.op_type == "Attention"]
    assert [types[name] for node in attention for name in node.input[:3]] == [
        onnx.TensorProto.FLOAT
    ] * 3 * LAYERS
    assert [types[node.output[0]] for node in attention] == [onnx.TensorProto.FLOAT] * LAYERS
    tokens = tokens_of(6, seed=13)
    found = runner(path, 1).extend([tokens], [0])
    want = Runner(target_graph(module, ROWS), 1).extend([tokens], [0])
    assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(found[0], want[0], atol=5e-2, rtol=0)


class FixedBatch(nn.Module):
    """Works for two rows only, so its batch cannot be dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def test_a_dynamic_axis_that_became_fixed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="fuse graph could not be traced"):
        export_graph(
            FixedBatch(),
            {"x": torch.zeros(2, 3)},
            ["y"],
            {"x": {0: "B"}},
            tmp_path / "fuse.onnx",
            name="fuse",
        )
    assert list(tmp_path.iterdir()) == []


def test_another_signature_than_expected_is_an_error(tmp_path: Path) -> None:
    x, y = TensorSpec("x", "float32", ("B", "T", 3)), TensorSpec("y", "float32", ("B", "T", 4))
    spec = GraphSpec("fuse", (x,), (y,))
    assert export_as(spec, nn.Linear(3, 4), tmp_path / "fuse.onnx") == spec
    with pytest.raises(EagleError, match="the traced fuse has the signature"):
        export_as(spec, nn.Linear(3, 5), tmp_path / "fuse.onnx")


def copy_of(target: Any, folder: Path) -> Path:
    for file in target.path.parent.iterdir():
        shutil.copy(file, folder / file.name)
    return folder / target.path.name


def test_check_names_a_cut_data_file(exported: Exported, tmp_path: Path) -> None:
    path = copy_of(exported("llama"), tmp_path)
    data = path.with_name("target.onnx.data")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(EagleError, match=r"target\.onnx\.data: expected at least \d+ bytes .* found \d+"):
        check_file(path)
    data.unlink()
    with pytest.raises(EagleError, match="found 0"):
        check_file(path)


def test_check_names_a_cut_graph(exported: Exported, tmp_path: Path) -> None:
    path = copy_of(exported("llama"), tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(EagleError, match=r"target\.onnx"):
        check_file(path)
    with pytest.raises(EagleError, match="does not exist"):
        check_file(tmp_path / "other.onnx")


def test_check_refuses_foreign_operators(exported: Exported, tmp_path: Path) -> None:
    path = copy_of(exported("llama"), tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EagleError, match=r"com\.microsoft"):
        check_file(path)


def test_check_refuses_another_signature(exported: Exported) -> None:
    target = exported("llama")
    with pytest.raises(EagleError, match="inputs"):
        check_file(target.path, exported("qwen3").spec)
