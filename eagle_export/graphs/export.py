"""Traces a module into one ONNX file with external data: the road shared by target, fuse and draft graphs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from eagle_export.checkpoints.weight_stream import Weight
from eagle_export.graphs import passes
from eagle_export.graphs.files import save
from eagle_export.graphs.links import Links
from eagle_export.graphs.translation import TRANSLATION
from eagle_export.models.ops import OPSET
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.dtypes import BY_ONNX, DTYPES
from eagle_run.errors import EagleError, first_line

DynamicAxes = Mapping[str, Mapping[int, str]]
Rewrite = Callable[[Any], None]  # changes a cleaned onnx_ir.Model in place, before it is written


class Options(TypedDict, total=False):
    """Options of every export; see `export_graph`."""

    rewrite: Rewrite | None
    weights: Mapping[str, Weight] | None
    links: Links | None


def export_graph(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dynamic: DynamicAxes,
    path: Path,
    *,
    name: str,
    prefix: str = "",
    rewrite: Rewrite | None = None,
    weights: Mapping[str, Weight] | None = None,
    links: Links | None = None,
) -> GraphSpec:
    """Trace `module` and write `path` plus `<name>.onnx.data` beside it (mode 0644).

    inputs: input name -> example tensor, in the order of `module.forward`'s positional arguments. The values
    do not matter, the sizes do: each dynamic axis needs an example size of at least 2, because a traced size
    of 1 becomes a constant.
    outputs: names for the tensors of the tuple that `module` returns, in order.
    dynamic: input name -> {axis: size name}; axes of one name have one size. All other axes are fixed.
    prefix: what to drop from the front of the module's parameter names, so that weights in the file are
    called as in the checkpoint.
    rewrite: a last change of the graph that leaves its signature as it is, such as quantisation.
    weights: what belongs in the parameters of a `module` on the meta device, by name without `prefix`; they
    are read one at a time as they are written.
    links: which weights stay in the files where they are (see `Links`).

    Returns the graph's signature. Raises EagleError when the module cannot be traced with these shapes; then
    neither file is left behind.
    """
    model = _trace(module, inputs, dynamic, name)
    passes.clean(
        model,
        list(inputs),
        outputs,
        dynamic,
        name=name,
        prefix=f"module.{prefix}",
        weights=weights,
        linked=None if links is None else links.take,
    )
    if rewrite is not None:
        rewrite(model)
    save(model, path, f"{name}.onnx.data", links)
    return GraphSpec(
        name=name,
        inputs=tuple(_spec(value) for value in model.graph.inputs),
        outputs=tuple(_spec(value) for value in model.graph.outputs),
    )


def export_as(
    expected: GraphSpec, module: nn.Module, path: Path, *, prefix: str = "", **options: Unpack[Options]
) -> GraphSpec:
    """`export_graph` with names, dynamic axes and example sizes from the signature that the graph must have.

    Raises EagleError when the module cannot be traced, or comes out with another signature.
    """
    dynamic = {
        tensor.name: {axis: size for axis, size in enumerate(tensor.shape) if isinstance(size, str)}
        for tensor in expected.inputs
    }
    outputs = [tensor.name for tensor in expected.outputs]
    inputs = example_inputs(expected, next(module.parameters()).device)
    spec = export_graph(module, inputs, outputs, dynamic, path, name=expected.name, prefix=prefix, **options)
    if spec != expected:
        raise EagleError(f"the traced {expected.name} has the signature {spec}, expected {expected}")
    return spec


def example_inputs(spec: GraphSpec, device: torch.device) -> dict[str, Tensor]:
    """Inputs to trace with: B=2, T=3, R=2, KV=5. Only the sizes matter, and no dynamic one may be 1."""
    sizes = {"B": 2, "T": 3, "R": 2, "KV": 5}
    return {
        tensor.name: torch.zeros(
            [sizes[size] if isinstance(size, str) else size for size in tensor.shape],
            dtype=DTYPES[tensor.dtype].torch,
            device=device,
        )
        for tensor in spec.inputs
    }


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
            return _translate(program)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the exporter wraps what went wrong in pages of advice
                cause = cause.__cause__
            raise EagleError(
                f"the {name} graph could not be traced: {type(cause).__name__}: {first_line(cause)}",
                hint="the whole trace is in this error's cause",
                parameters=["debug"],
            ) from error


def _translate(program: torch.export.ExportedProgram) -> Any:
    """From torch operators to an ONNX model.

    The exporter wants to decompose first what it has no translation for, and to that end traces everything
    twice more: half of the time of an export. A graph of plain functions that all have a translation comes
    out the same without, so that is tried first.
    """

    def convert() -> Any:
        return torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=TRANSLATION,
            optimize=False,
            verbose=False,
        )

    if _is_functional(program.graph):
        decompose = program.run_decompositions
        program.run_decompositions = lambda *_, **__: program
        try:
            return convert().model
        except torch.onnx.OnnxExporterError:  # an operator without a translation
            program.run_decompositions = decompose
    return convert().model


def _is_functional(graph: torch.fx.Graph) -> bool:
    """Whether nothing in the graph writes into its arguments or runs another graph."""
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__module__", "") == "_operator":
            continue  # _operator: arithmetic on sizes, and getitem
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            return False
    return True


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


def _spec(value: Any) -> TensorSpec:
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(name=value.name, dtype=BY_ONNX[value.dtype].name, shape=shape)
