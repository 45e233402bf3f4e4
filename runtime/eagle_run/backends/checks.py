"""Checks of bound tensors against a graph's signature, shared by every backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.dtypes import DTYPES
from eagle_run.errors import EagleError


def check_tensors(spec: GraphSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Raises EagleError unless `tensors` fits `spec`; returns the size of each named axis.

    One name must mean one size in all tensors: a tree mask of another width than the others expect is an
    error here, not a silent misread in a backend.
    """
    names = {tensor.name for tensor in (*spec.inputs, *spec.outputs)}
    if unknown := sorted(set(tensors) - names):
        raise EagleError(f"graph {spec.name} has no tensor named {', '.join(unknown)}")
    axes: dict[str, int] = {}
    for expected in (*spec.inputs, *spec.outputs):
        if expected.name not in tensors:
            raise EagleError(f"graph {spec.name}: no tensor given for {expected.name}")
        _check_one(spec.name, expected, tensors[expected.name], axes)
    return axes


def _check_one(graph: str, expected: TensorSpec, found: torch.Tensor, axes: dict[str, int]) -> None:
    where = f"graph {graph}, tensor {expected.name}"
    if found.dtype != DTYPES[expected.dtype].torch:
        raise EagleError(f"{where}: expected {expected.dtype}, found {found.dtype}")
    if found.dim() != len(expected.shape):
        raise EagleError(f"{where}: expected shape {list(expected.shape)}, found {list(found.shape)}")
    for want, size in zip(expected.shape, found.shape, strict=True):
        known = axes.setdefault(want, size) if isinstance(want, str) else want
        if known != size:
            raise EagleError(f"{where}: expected {want} = {known}, found shape {list(found.shape)}")
    if not found.is_contiguous():
        raise EagleError(f"{where}: the tensor is not contiguous")
