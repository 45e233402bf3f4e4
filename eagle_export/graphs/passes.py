"""Small rewrites of a traced graph, each of which says what it expects and fails loudly when it is not so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from eagle_run.errors import EagleError

TORCH_NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT64: "int64",
    ir.DataType.BOOL: "bool",
}


def clean(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
    *,
    name: str,
) -> None:
    """Give the graph its names, drop what nothing reads, and merge what is computed twice. In place."""
    name_signature(model, inputs, outputs, dynamic)
    common.IdentityEliminationPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    model.graph.name = name
    model.producer_name = "eagle-export"
    model.producer_version = ""
    model.doc_string = None


def name_signature(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    """Rename inputs, outputs and dynamic sizes (the tracer calls them s77) and check that none became fixed."""
    graph = model.graph
    _rename(graph.inputs, inputs, "input")
    _rename(graph.outputs, outputs, "output")
    sizes: dict[str, str] = {}
    for value in graph.inputs:
        for axis, size in dynamic.get(value.name or "", {}).items():
            dim = value.shape[axis]  # type: ignore[index]
            if isinstance(dim, int):
                raise EagleError(f"axis {axis} of {value.name} was traced as the constant {dim}, expected {size}")
            sizes[str(dim.value)] = size
    for value in (*graph.inputs, *graph.outputs):
        assert value.shape is not None
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, int):
                continue
            if str(dim.value) not in sizes:
                raise EagleError(f"axis {axis} of {value.name} has the size {dim.value}, expected {sorted(set(sizes.values()))}")
            value.shape[axis] = sizes[str(dim.value)]


def _rename(values: Sequence[Any], names: Sequence[str], kind: str) -> None:
    if len(values) != len(names):
        raise EagleError(f"the traced graph has {len(values)} {kind}s, expected {len(names)}: {list(names)}")
    for value, name in zip(values, names, strict=True):
        value.name = name
