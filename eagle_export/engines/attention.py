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
_HIDDEN = -1e30  # what a score becomes where the mask does not show it: as good as minus infinity in float32
_HINT = "what a row may see belongs in tree_mask: compilers ignore other ways to say it without a word"


def check_attention(graph: Any, path: Path) -> int:
    """Raise EagleError unless every attention of an ONNX graph can only read what `tree_mask` shows it.

    That is, of an Attention: its mask is the graph's input tree_mask, or that and another mask; it has
    neither past keys nor a count of valid keys (nonpad_kv_seqlen), nor is it told to be causal or to cap its
    scores, all of which TensorRT drops; and its keys and values are the first rows of the cache, as many as
    the mask is wide (TensorRT does not notice another width). Of an attention that is written out (one with
    sinks, which Attention does not know): its keys and values are such rows, and where such a mask is false
    its scores are replaced before exponents are taken.

    Returns how many attentions are written out.
    """
    makers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    written = 0
    for node in graph.node:
        problem = ""
        if node.op_type == "Attention":
            problem = _problem(node, makers, constants)
        elif node.op_type == "MatMul" and _is_cache(node.input[1], makers):
            problem = _written_problem(node, makers, constants)
            written += 1
        if problem:
            raise EagleError(f"{path}: node {node.name!r} ({node.op_type}) {problem}", hint=_HINT)
    return written


def _problem(node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
    """What is wrong with an Attention node; empty when nothing is."""
    inputs = [*node.input, *[""] * (7 - len(node.input))]
    if not _is_mask(inputs[3], makers):
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


def _written_problem(node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
    """What is wrong with the product of shares and values at the end of an attention that is written out."""
    where = makers.get(_source(node.input[0], makers, ("Reshape", "Exp", "Sub")))
    if where is None or where.op_type != "Where":
        return f"reads values of the cache with shares that no {MASK} has gone into"
    mask = _source(where.input[0], makers, ("Unsqueeze",))
    if not _is_mask(mask, makers):
        return f"has {mask} for its mask, expected {MASK}"
    hidden = _values(where.input[2], makers, constants)
    if hidden is None or max(hidden) > _HIDDEN:
        return f"lets scores outside its mask count, expected {_HIDDEN:g} or less in their place"
    scores = makers.get(_source(where.input[1], makers, ("Reshape",)))
    keys = None if scores is None or scores.op_type != "MatMul" else makers.get(scores.input[1])
    if keys is None or keys.op_type != "Transpose":
        return "takes scores that are no product with keys"
    for kind, name in (("keys", keys.input[0]), ("values", node.input[1])):
        if not _is_sliced(name, makers, constants):
            return f"takes {kind} that are not the cache's first rows, as many as {MASK} is wide"
    return ""


def _is_cache(name: str, makers: Mapping[str, Any]) -> bool:
    """Whether a tensor is a cache that was just written, or a part of it."""
    node = makers.get(_source(name, makers, (*_PASSED, "Slice")))
    return node is not None and node.op_type == "TensorScatter"


def _source(name: str, makers: Mapping[str, Any], passed: tuple[str, ...]) -> str:
    """The tensor that `name` is made of, beyond operators of the kinds in `passed`."""
    while (node := makers.get(name)) is not None and node.op_type in passed:
        name = node.input[0]
    return name


def _is_mask(name: str, makers: Mapping[str, Any]) -> bool:
    """Whether a tensor is the tree mask, or that and another: it shows no more than the tree mask does."""
    node = makers.get(name)
    return name == MASK or (node is not None and node.op_type == "And" and MASK in node.input)


def _is_sliced(name: str, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
    """Whether a tensor is x[:, :, :KV] of a cache, KV being the last size of the mask."""
    node = makers.get(_source(name, makers, _PASSED))
    if node is None or node.op_type != "Slice" or len(node.input) < 4:
        return False
    starts, ends, axes = node.input[1:4]
    steps = node.input[4] if len(node.input) > 4 else ""
    return (
        _values(starts, makers, constants) == [0]
        and _values(axes, makers, constants) == [2]
        and (not steps or _values(steps, makers, constants) == [1])
        and _is_mask_width(makers.get(ends), makers)
    )


def _is_mask_width(node: Any, makers: Mapping[str, Any]) -> bool:
    if node is None or node.op_type != "Shape" or not _is_mask(node.input[0], makers):
        return False
    values = {attribute.name: attribute.i for attribute in node.attribute}
    return values.get("start") in (3, -1) and values.get("end", 4) == 4


def _values(name: str, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> list[float] | None:
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
    return {
        "value_ints": list(attribute.ints),
        "value_int": [attribute.i],
        "value_float": [attribute.f],
    }.get(attribute.name)
