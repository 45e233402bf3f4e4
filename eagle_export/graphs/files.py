"""A graph on disk: one ONNX file, and its weights one after the other in a file of data beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from eagle_export.checkpoints.stored import StoredTensor
from eagle_export.checkpoints.weight_stream import Streamed
from eagle_run.dtypes import BY_ONNX
from eagle_run.errors import EagleError

if TYPE_CHECKING:
    from eagle_export.graphs.links import Links

_INSIDE = 256  # bytes up to which a tensor is kept in the ONNX file itself


def save(model: ir.Model, path: Path, data_name: str, links: Links | None = None) -> None:
    """Writes `model` to `path` and its weights to `data_name` beside it (mode 0644), whole or not at all.

    Weights that `links` takes are not written: the graph points to where they are. The model's own tensors
    are gone afterwards. A tensor is made when it is written; memory holds one at a time.
    Raises EagleError for weights that are not finite numbers, written or linked.
    """
    data = path.parent / data_name
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    large = []
    try:
        for value in values:
            tensor = value.const_value
            if tensor is None:
                raise EagleError(f"the graph has a weight {value.name} without values")
            if links is not None and links.take(value):
                _check_finite(tensor)
                value.const_value = links.external(value, path.parent)
            elif tensor.nbytes > _INSIDE:
                large.append(value)  # which are looked at block by block as they are written
            else:
                _check_finite(tensor)
        if large:
            stored = ir.external_data.convert_tensors_to_external(
                [value.const_value for value in large], path.parent, data_name
            )
            for value, tensor in zip(large, stored, strict=True):
                value.const_value = tensor
        onnx.save(ir.to_proto(model), path)
        for file in (path, data):
            if file.exists():  # a graph without large weights has no data file
                os.chmod(file, 0o644)
    except BaseException:
        path.unlink(missing_ok=True)
        data.unlink(missing_ok=True)
        raise


def _check_finite(tensor: ir.TensorProtocol) -> None:
    if isinstance(tensor, Streamed):
        tensor.check_finite()


def load(path: Path) -> ir.Model:
    """The graph at `path`, its weights still in their files; they are read when they are asked for.

    Weights may be in files that have another name elsewhere (see `links`), which ONNX's own readers refuse.
    """
    model = ir.load(path)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                dtype = BY_ONNX[tensor.dtype].torch
                stored = StoredTensor(
                    path.parent / tensor.location,
                    tensor.name,
                    tensor.offset or 0,
                    tuple(int(size) for size in tensor.shape),
                    dtype,
                )
                value.const_value = Streamed(tensor.name, [(stored, None)], dtype)
    return model


def data_files(path: Path) -> list[Path]:
    """The files that the graph at `path` has its weights in, by name."""
    model = onnx.load(path, load_external_data=False)
    names = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [path.parent / name for name in sorted(names)]
