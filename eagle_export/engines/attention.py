"""Checks how an ONNX graph says what each row attends to: by the tree mask, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_run.errors import EagleError

MASK = "tree_mask"
_PASSED = ("Cast", "Identity")  # what may stand between a slice of the cache and Attention
# What else an attention may be told. TensorRT-RTX 1.7 reads is_causal (beside a mask), softcap and
# qk_matmul_output_mode, and compute as if they were not there.
_KNOWN = ("scale",)
_HINT = "what a row may see belongs in tree_mask: compilers ignore other ways to say it without a word"


def check_attention(graph: Any, path: Path) -> None:
    """Raise EagleError unless every Attention of an ONNX graph can only read what `tree_mask` shows it.

    That is: its mask is the graph's input tree_mask; it has neither past keys nor a count of valid keys
    (nonpad_kv_seqlen), nor is it told to be causal or to cap its scores, all of which TensorRT drops; and its
    keys and values are the first rows of the cache, as many as the mask is wide (TensorRT does not notice
    another width).
    """
    makers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Attention":
            problem = _problem(node, makers, constants)
            if problem:
                raise EagleError(f"{path}: node {node.name!r} (Attention) {problem}", hint=_HINT)


def _problem(node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
    """What is wrong with an Attention node; empty when nothing is."""
    inputs = [*node.input, *[""] * (7 - len(node.input))]
    if inputs[3] != MASK:
        return f"has {inputs[3] or 'no mask'} for its mask, expected {MASK}"
    if inputs[6]:
        return f"takes nonpad_kv_seqlen ({inputs[6]}), which TensorRT drops"
    if inputs[4] or inputs[5]:
        return "takes past keys or values; the cache is written by TensorScatter"
    for attribute in node.attribute:
        if attribute.name not in _KNOWN and (attribute.i or attribute.f):
            return f"has {attribute.name}, which TensorRT drops"
    for kind, name in (("keys", inputs[1]), ("values", inputs[2])):
        if not _is_sliced(name, makers, constants):
            return f"takes {kind} that are not the cache's first rows, as many as {MASK} is wide"
    return ""


def _is_sliced(name: str, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
    """Whether a tensor is x[:, :, :KV] of a cache, KV being the last size of the mask."""
    node = makers.get(name)
    while node is not None and node.op_type in _PASSED:
        node = makers.get(node.input[0])
    if node is None or node.op_type != "Slice" or len(node.input) < 4:
        return False
    starts, ends, axes = node.input[1:4]
    steps = node.input[4] if len(node.input) > 4 else ""
    return (
        _ints(starts, makers, constants) == [0]
        and _ints(axes, makers, constants) == [2]
        and (not steps or _ints(steps, makers, constants) == [1])
        and _is_mask_width(makers.get(ends))
    )


def _is_mask_width(node: Any) -> bool:
    if node is None or node.op_type != "Shape" or node.input[0] != MASK:
        return False
    values = {attribute.name: attribute.i for attribute in node.attribute}
    return values.get("start") in (3, -1) and values.get("end", 4) == 4


def _ints(name: str, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> list[int] | None:
    """The values of a constant; None for anything that is computed."""
    from onnx import numpy_helper

    if name in constants:
        return numpy_helper.to_array(constants[name]).reshape(-1).tolist()
    node = makers.get(name)
    if node is None or node.op_type != "Constant":
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return numpy_helper.to_array(attribute.t).reshape(-1).tolist()
    return {"value_ints": list(attribute.ints), "value_int": [attribute.i]}.get(attribute.name)
