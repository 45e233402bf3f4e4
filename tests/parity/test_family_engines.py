"""Graphs of families with sinks, windows and experts as a compiler reads them, and what is caught there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from support.targetmaker import LAYERS

from eagle_export.engines.attention import check_attention
from eagle_export.engines.network import check_network, load_graph, parse
from eagle_run.errors import EagleError

Exported = Callable[[str], Any]
Edit = Callable[[onnx.GraphProto], None]


@pytest.fixture
def rtx() -> Iterator[Any]:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'eagle-export[rtx]'")
    from eagle_run.backends.library import find_library

    gc.collect()
    gc.disable()  # one inside of the library's logger would wait for itself
    yield find_library("tensorrt-rtx")
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt-oss-fp16", "llama4-fp16", "gemma3-fp16", "qwen3-moe-fp16"])
def test_the_compiler_reads_all_of_it(kind: str, exported: Exported, rtx: Any) -> None:
    trt = rtx.module
    path, spec = exported(kind).path, exported(kind).spec
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network, *_ = kept = parse(rtx, builder, logger, path)
    kinds = check_network(rtx, network, load_graph(path), path, spec)
    assert kinds.get("ATTENTION_INPUT", 0) == (0 if kind == "gpt-oss-fp16" else LAYERS)
    assert kinds["KV_CACHE_UPDATE"] == 2 * LAYERS
    del kept, builder


def test_attentions_with_sinks_are_counted(exported: Exported) -> None:
    assert check_attention(load_graph(exported("gpt-oss-fp16").path), Path("x")) == LAYERS
    assert check_attention(load_graph(exported("llama4-fp16").path), Path("x")) == 0


def scores(graph: onnx.GraphProto) -> onnx.NodeProto:
    """Where the scores of the first attention meet its mask."""
    return next(node for node in graph.node if node.op_type == "Where" and "self_attn" in node.name)


def other_mask(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Not", [scores(graph).input[0]], ["turned"]))
    scores(graph).input[0] = "turned"


def no_mask(graph: onnx.GraphProto) -> None:
    node = scores(graph)
    for other in graph.node:
        for place, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[place] = node.input[1]


def mild(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Constant", [], ["mild"], value_float=-10.0))
    scores(graph).input[2] = "mild"


def whole_keys(graph: onnx.GraphProto) -> None:
    sliced = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Slice"}
    key = next(node for node in graph.node if node.op_type == "Cast" and node.input[0] in sliced)
    key.input[0] = sliced[key.input[0]]


def whole_values(graph: onnx.GraphProto) -> None:
    sliced = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Slice"}
    value = [node for node in graph.node if node.op_type == "Cast" and node.input[0] in sliced][1]
    value.input[0] = sliced[value.input[0]]


def wider(graph: onnx.GraphProto) -> None:
    """A mask that shows more than the tree mask does."""
    for node in graph.node:
        if node.op_type == "And" and "tree_mask" in node.input:
            node.op_type = "Or"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (other_mask, "expected tree_mask"),
        (no_mask, "no tree_mask has gone into"),
        (mild, "outside its mask count"),
        (whole_keys, "keys that are not"),
        (whole_values, "values that are not"),
        (wider, "expected tree_mask"),
    ],
)
def test_a_mask_that_was_lost_is_noticed(edit: Edit, reason: str, exported: Exported) -> None:
    graph = load_graph(exported("gpt-oss-fp16").path)
    edit(graph)
    with pytest.raises(EagleError, match=reason) as caught:
        check_attention(graph, Path("target.onnx"))
    assert "self_attn/MatMul" in caught.value.message


def test_a_wider_mask_of_an_attention_is_noticed(exported: Exported) -> None:
    graph = load_graph(exported("llama4-fp16").path)
    wider(graph)
    with pytest.raises(EagleError, match="expected tree_mask"):
        check_attention(graph, Path("target.onnx"))
