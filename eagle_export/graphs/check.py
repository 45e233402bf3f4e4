"""Checks that an ONNX file is whole, valid and made of standard operators only."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from eagle_export.graphs.files import data_files
from eagle_export.models.ops import OPSET
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.errors import EagleError, first_line

_AGAIN = "export it again; if it stays, please report it with the model's config.json"


def check_file(path: Path, spec: GraphSpec | None = None) -> None:
    """Raise EagleError unless `path` is a graph that every ONNX runtime can load.

    The file and its external data are there in full; ONNX's own full check (with strict shape inference)
    passes; opset 24 of the standard domain is the only one used, without local functions; and when `spec` is
    given, inputs and outputs have exactly its names, dtypes and shapes.
    """
    if not path.is_file():
        raise EagleError(f"{path} does not exist", hint="export it first")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises its own classes for a damaged file
        raise EagleError(f"{path} is not an ONNX file: {first_line(error)}", hint=_AGAIN) from error
    _check_data(path, model)
    _check_operators(path, model)
    try:
        with _as_checked(path) as file:
            onnx.checker.check_model(str(file), full_check=True)
    except Exception as error:  # ValidationError, InferenceError and others without a common base
        raise EagleError(f"{path} fails ONNX's check: {first_line(error)}", hint=_AGAIN) from error
    if spec is not None:
        _check_signature(path, model, spec)


def _check_data(path: Path, model: Any) -> None:
    for tensor in model.graph.initializer:
        external = {entry.key: entry.value for entry in tensor.external_data}
        if not external:
            continue
        data = path.parent / external["location"]
        needed = int(external.get("offset", 0)) + int(external.get("length", 0))
        size = data.stat().st_size if data.is_file() else 0
        if size < needed:
            raise EagleError(
                f"{data}: expected at least {needed} bytes (for {tensor.name}), found {size}",
                hint="the weights beside the graph are missing or cut short; export it again",
            )


@contextmanager
def _as_checked(path: Path) -> Iterator[Path]:
    """The graph as ONNX's check takes it: that refuses data in a file which has another name elsewhere.

    Such data is stood in for by empty files of the same sizes; the check reads none of it.
    """
    sizes = {file.name: file.stat() for file in data_files(path)}
    if all(stat.st_nlink == 1 for stat in sizes.values()):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        shutil.copyfile(path, copy)
        for name, stat in sizes.items():
            with copy.with_name(name).open("wb") as file:
                file.truncate(stat.st_size)
        yield copy


def _check_operators(path: Path, model: Any) -> None:
    opsets = {(entry.domain or "ai.onnx", entry.version) for entry in model.opset_import}
    foreign = sorted(
        {
            f"{node.domain}::{node.op_type}"
            for node in _nodes(model.graph)
            if node.domain not in ("", "ai.onnx")
        }
    )
    if foreign or model.functions or opsets != {("ai.onnx", OPSET)}:
        raise EagleError(
            f"{path}: expected only standard operators of opset {OPSET}, found opsets {sorted(opsets)}, "
            f"other operators {foreign} and {len(model.functions)} functions",
            hint=_AGAIN,
        )


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _check_signature(path: Path, model: Any, spec: GraphSpec) -> None:
    for kind, values, tensors in (
        ("inputs", model.graph.input, spec.inputs),
        ("outputs", model.graph.output, spec.outputs),
    ):
        stored = []
        for value in values:
            tensor = value.type.tensor_type
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
            shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            stored.append((value.name, dtype, shape))
        expected = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        if stored != expected:
            wrong = [
                f"{have} instead of {want}"
                for have, want in zip(stored, expected, strict=False)
                if have != want
            ]
            raise EagleError(
                f"{path}: {len(stored)} {kind}, expected {len(expected)}; "
                f"{wrong[0] if wrong else 'some are missing or too many'}",
                hint=_AGAIN,
            )
