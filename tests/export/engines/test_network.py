"""What TensorRT's parser refuses, and what it drops without a word: our own check must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.enginemaker import LAYERS, Graphs

from eagle_export.engines.attention import check_attention
from eagle_export.engines.build import _logger
from eagle_export.engines.layers import LayerLog
from eagle_export.engines.network import _check_inputs_read, _check_masks, check_network, load_graph, parse
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.errors import EagleError

Edit = Callable[[onnx.GraphProto], None]
Parsed = tuple[Any, Any, Any, Any]


def read(rtx: Any, path: Path) -> Parsed:
    """(network, and what it needs to live)."""
    logger = _logger(rtx.module, LayerLog(), lambda _: None)
    builder = rtx.module.Builder(logger)
    network, parser = parse(rtx, builder, logger, path)
    return network, parser, builder, logger


def edited(graphs: Graphs, folder: Path, edit: Edit, graph: str = "target") -> Path:
    model = onnx.load(graphs.folder / f"{graph}.onnx")
    edit(model.graph)
    path = folder / "edited.onnx"
    onnx.save(model, path)
    return path


def attentions(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == "Attention"]


def first(graph: onnx.GraphProto, kind: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == kind)


def lengths(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["B"]))
    for node in attentions(graph):
        node.input.extend(["", "", "lengths"])


def no_mask(graph: onnx.GraphProto) -> None:
    attentions(graph)[1].input.pop()


def attribute(name: str, value: float) -> Edit:
    return lambda graph: attentions(graph)[1].attribute.append(helper.make_attribute(name, value))


def slices(place: int, value: int) -> Edit:
    """Every slice of a cache with a constant for its start (1), end (2) or axis (3)."""

    def edit(graph: onnx.GraphProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array([value]), "constant"))
        for node in graph.node:
            if node.op_type == "Slice":
                node.input[place] = "constant"

    return edit


def whole_cache(graph: onnx.GraphProto) -> None:
    """Keys and values that skip the slice."""
    sliced = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Slice"}
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in sliced:
            node.input[0] = sliced[node.input[0]]


def other_mask(graph: onnx.GraphProto) -> None:
    """A mask that lost its first row's columns on the way."""
    graph.node.insert(0, helper.make_node("Not", ["tree_mask"], ["turned"], name="turn"))
    attentions(graph)[0].input[3] = "turned"


DROPPED: dict[str, tuple[Edit, str]] = {
    "a count of valid keys": (lengths, "nonpad_kv_seqlen"),
    "no mask": (no_mask, "no mask"),
    "causal beside a mask": (attribute("is_causal", 1), "is_causal"),
    "capped scores": (attribute("softcap", 20.0), "softcap"),
    "keys of a fixed width": (slices(2, 64), "keys that are not"),
    "keys from row 1 on": (slices(1, 1), "keys that are not"),
    "keys cut on another axis": (slices(3, 1), "keys that are not"),
    "keys of the whole cache": (whole_cache, "keys that are not"),
    "another mask": (other_mask, "expected tree_mask"),
}


@pytest.mark.parametrize("case", DROPPED)
def test_tensorrt_takes_it_but_we_do_not(
    case: str, rtx: Any, graphs: Callable[[str], Graphs], tmp_path: Path
) -> None:
    edit, reason = DROPPED[case]
    tiny = graphs("fp16")
    path = edited(tiny, tmp_path, edit)
    network, *_ = kept = read(rtx, path)  # the parser raises nothing
    with pytest.raises(EagleError, match=reason) as caught:
        check_network(rtx, network, load_graph(path), path, tiny.specs["target"])
    assert "self_attn/Attention" in caught.value.message
    del kept


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("graph", ["target", "draft", "fuse"])
def test_our_own_graphs_pass(graph: str, precision: str, rtx: Any, graphs: Callable[[str], Graphs]) -> None:
    tiny = graphs(precision)
    path = tiny.folder / f"{graph}.onnx"
    network, *_ = kept = read(rtx, path)
    kinds = check_network(rtx, network, load_graph(path), path, tiny.specs[graph])
    layers = {"target": LAYERS, "draft": 1, "fuse": 0}[graph]
    assert kinds.get("ATTENTION_INPUT", 0) == layers
    assert kinds.get("KV_CACHE_UPDATE", 0) == kinds.get("ROTARY_EMBEDDING", 0) == 2 * layers
    assert kinds["MATRIX_MULTIPLY"] == {"target": 4 * LAYERS + 1, "draft": 5, "fuse": 1}[graph]
    del kept


def test_an_input_that_nothing_reads(rtx: Any, graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    """The dropped count of keys shows in the network as well: nobody reads it."""
    path = edited(graphs("fp16"), tmp_path, lengths)
    network, *_ = kept = read(rtx, path)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    with pytest.raises(EagleError, match="dropped what reads lengths"):
        _check_inputs_read(layers, network, path)
    del kept


def test_a_layer_without_its_mask(rtx: Any, graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    path = edited(graphs("fp16"), tmp_path, no_mask)
    network, *_ = kept = read(rtx, path)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    with pytest.raises(EagleError, match=r"layers.1.self_attn/Attention\S* came out without a mask"):
        _check_masks(rtx.module, layers, path)
    del kept


def changed(spec: GraphSpec, tensor: str, **changes: Any) -> GraphSpec:
    def change(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(replace(one, **changes) if one.name == tensor else one for one in tensors)

    return replace(spec, inputs=change(spec.inputs), outputs=change(spec.outputs))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda spec: changed(spec, "features", dtype="float32"), "'HALF'.* instead of .*'FLOAT'"),
        (lambda spec: changed(spec, "past_key.0", shape=("B", 2, 64, 16)), "instead of"),
        (lambda spec: changed(spec, "tree_mask", name="mask"), "instead of"),
        (lambda spec: replace(spec, outputs=spec.outputs[:-1]), "outputs, expected"),
    ],
)
def test_another_signature(
    change: Callable[[GraphSpec], GraphSpec], reason: str, rtx: Any, graphs: Callable[[str], Graphs]
) -> None:
    tiny = graphs("fp16")
    path = tiny.folder / "target.onnx"
    network, *_ = kept = read(rtx, path)
    with pytest.raises(EagleError, match=reason):
        check_network(rtx, network, load_graph(path), path, change(tiny.specs["target"]))
    del kept


def test_a_layer_that_did_not_become_native(
    rtx: Any, graphs: Callable[[str], Graphs], tmp_path: Path
) -> None:
    """The file says one thing, the network another: here because the file was exchanged after parsing."""
    tiny = graphs("fp16")
    path = tiny.folder / "target.onnx"
    network, *_ = kept = read(rtx, path)

    def one_more(graph: onnx.GraphProto) -> None:
        node = first(graph, "RotaryEmbedding")
        graph.node.append(helper.make_node("RotaryEmbedding", node.input, ["unused"], name="more"))

    other = edited(tiny, tmp_path, one_more)
    with pytest.raises(EagleError, match="5 RotaryEmbedding nodes became 4 ROTARY_EMBEDDING layers"):
        check_network(rtx, network, load_graph(other), path, tiny.specs["target"])
    del kept


@pytest.mark.parametrize(
    ("edit", "node", "reason"),
    [
        ("Det", "model.layers.0.mlp.act_fn/Sigmoid", "(Det)"),
        ("NoSuchOperator", "model.layers.1.self_attn/Attention", "Plugin not found"),
        ("circular", "model.layers.0.self_attn/TensorScatter", "Only linear mode"),
    ],
)
def test_what_the_parser_refuses_names_node_and_layer(
    edit: str, node: str, reason: str, rtx: Any, broken: Callable[[str, str], Path]
) -> None:
    with pytest.raises(EagleError) as caught:
        read(rtx, broken(edit, node))
    layer = node.rpartition("/")[0]
    assert f"'{node}'" in caught.value.message
    assert f"of the model's layer {layer}:" in caught.value.message
    assert reason in caught.value.message
    assert rtx.label in caught.value.message


@pytest.fixture
def broken(graphs: Callable[[str], Graphs], tmp_path: Path) -> Callable[[str, str], Path]:
    """(what to do, node) -> the tiny target with that node made unreadable."""

    def make(change: str, name: str) -> Path:
        def edit(graph: onnx.GraphProto) -> None:
            node = next(one for one in graph.node if one.name == name)
            if change == "circular":
                next(one for one in node.attribute if one.name == "mode").s = b"circular"
            else:
                node.op_type = change

        return edited(graphs("fp16"), tmp_path, edit)

    return make


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"\0" * 100)  # TensorRT's parser reads this as an empty network
    with pytest.raises(EagleError, match="is not an ONNX file"):
        load_graph(path)


def test_attention_of_the_hand_made_bundle(tiny_bundle: Path) -> None:
    """Needs no library: Slice bounds as initializers, no casts between."""
    path = tiny_bundle / "onnx/target.onnx"
    check_attention(onnx.load(path).graph, path)
