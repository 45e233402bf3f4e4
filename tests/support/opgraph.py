"""A CUDA graph without CUDA: the operations of a function, recorded, and replayed on the same memory.

Like a capture, `record` leaves all memory as it was, and like a replay, `replay` runs no Python of the
function: what the host computed meanwhile (a length, a branch, an index) is baked in. So rounds that are
right when they are replayed here depend on nothing but device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle_run.engine.cuda_graphs import NotCapturedError


class OpGraph:
    """What `OpRecorder.record` gives: `torch.cuda.CUDAGraph`'s replay and reset."""

    def __init__(self, operations: list[tuple[Any, Any, Any, list[Tensor]]]) -> None:
        self._operations = operations
        self.replays = 0

    @property
    def alive(self) -> bool:
        return bool(self._operations)

    @torch.no_grad()
    def replay(self) -> None:
        assert self._operations, "replayed after it was reset"
        self.replays += 1
        for operation, args, kwargs, outputs in self._operations:
            fresh = tensors_of(operation(*args, **kwargs))
            for place, made in zip(outputs, fresh, strict=True):
                if place.data_ptr() != made.data_ptr():  # not a view, nor written in place
                    place.copy_(made)

    def reset(self) -> None:
        self._operations = []


class OpRecorder(TorchDispatchMode):
    """A `Recorder`. Refuses what a capture would refuse: values from the host, and values for it."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[OpGraph] = []
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def record(self, function: Callable[[], None]) -> tuple[OpGraph, int]:
        self._operations, self._before = [], []
        try:
            with self:
                function()
        except RuntimeError as error:
            raise NotCapturedError(str(error)) from error
        finally:
            for place, value in reversed(self._before):
                place.copy_(value)
        self.graphs.append(OpGraph(self._operations))
        return self.graphs[-1], 1000

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError("a tensor is made from values of the host, which a capture does not permit")
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(given, Tensor) and argument.alias_info and argument.alias_info.is_write:
                self._before.append((given, given.clone()))
        result = func(*args, **kwargs)
        if any(not isinstance(leaf, Tensor) for leaf in tree_leaves(result) if leaf is not None):
            raise RuntimeError(f"{func} gives a value to the host, which a capture does not permit")
        self._operations.append((func, args, kwargs, tensors_of(result)))
        return result


def tensors_of(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
