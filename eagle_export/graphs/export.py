"""Traces a module into one ONNX file with external data: the road shared by target, fuse and draft graphs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.graphs import passes
from eagle_export.graphs.ops import OPSET, TRANSLATION
from eagle_run.backends.base import GraphSpec, TensorSpec
from eagle_run.errors import EagleError

DynamicAxes = Mapping[str, Mapping[int, str]]


def export_graph(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dynamic: DynamicAxes,
    path: Path,
    *,
    name: str,
    prefix: str = "",
) -> GraphSpec:
    """Trace `module` and write `path` plus `<name>.onnx.data` beside it (mode 0644).

    inputs: input name -> example tensor, in the order of `module.forward`'s positional arguments. The values
    do not matter, the sizes do: each dynamic axis needs an example size of at least 2, because a traced size
    of 1 becomes a constant.
    outputs: names for the tensors of the tuple that `module` returns, in order.
    dynamic: input name -> {axis: size name}; axes of one name have one size. All other axes are fixed.
    prefix: what to drop from the front of the module's parameter names, so that weights in the file are
    called as in the checkpoint.

    Returns the graph's signature. Raises EagleError when the module cannot be traced with these shapes; then
    neither file is left behind.
    """
    model = _trace(module, inputs, dynamic, name)
    passes.clean(model, list(inputs), outputs, dynamic, name=name, prefix=f"module.{prefix}")
    _save(model, path, f"{name}.onnx.data")
    return GraphSpec(
        name=name,
        inputs=tuple(_spec(value) for value in model.graph.inputs),
        outputs=tuple(_spec(value) for value in model.graph.outputs),
    )


class _Flat(nn.Module):
    """Gives any module the signature `forward(*tensors)`, so that shapes can be described by position."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: Tensor) -> Any:
        return self.module(*tensors)


def _trace(module: nn.Module, inputs: Mapping[str, Tensor], dynamic: DynamicAxes, name: str) -> Any:
    unknown = [key for key in dynamic if key not in inputs]
    if unknown:
        raise EagleError(f"dynamic axes are given for {unknown}, which are not inputs of the {name} graph")
    names = {size for axes in dynamic.values() for size in axes.values()}
    dims = {size: torch.export.Dim(size, min=1, max=2**20) for size in sorted(names)}
    shapes = tuple({axis: dims[size] for axis, size in dynamic.get(key, {}).items()} for key in inputs)
    with torch.no_grad(), _quiet():
        try:
            program = torch.export.export(
                _Flat(module).eval(), tuple(inputs.values()), dynamic_shapes={"tensors": shapes}, strict=False
            )
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=TRANSLATION,
                optimize=False,
                verbose=False,
            )
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise EagleError(
                f"the {name} graph could not be traced: {type(error).__name__}: {first_line}",
                hint="run with --debug for the whole trace",
            ) from error
    assert onnx_program is not None
    return onnx_program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns about its own internals; nothing in there is for the user."""
    loggers = [logging.getLogger(key) for key in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _save(model: Any, path: Path, data_name: str) -> None:
    import onnx_ir

    data = path.parent / data_name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        onnx_ir.save(model, path, external_data=data_name)
        for file in (path, data):
            if file.exists():  # a graph without large weights has no data file
                os.chmod(file, 0o644)
    except BaseException:
        path.unlink(missing_ok=True)
        data.unlink(missing_ok=True)
        raise


def _spec(value: Any) -> TensorSpec:
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(name=value.name, dtype=passes.TORCH_NAMES[value.dtype], shape=shape)
