"""Tensors that note what is done to them instead of doing it, so that loading a model reads no weights.

Transformers renames, stacks, joins and converts the tensors of a checkpoint when it loads a model. Given
these in place of real ones it does just the same, and what comes out says how to make each weight later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from eagle_export.checkpoints.weight_stream import Converted, Weight

# Operators that leave values and their order as they are; the last may change the type.
_NOTHING = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
)
_VALUES = 4 << 20  # that are compared at a time
_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)


class Recorded(Tensor):
    """A tensor of a known shape and type without values. `weight` makes them."""

    weight: Weight

    @staticmethod
    def __new__(cls, weight: Weight) -> Recorded:
        cpu = torch.device("cpu")
        made: Any = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=cpu)
        made.weight = weight
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} writes into a weight that was not read")
        if func is torch.ops.aten.equal.default:  # are an embedding and lm_head in a checkpoint the same?
            return _equal(*args)
        kwargs = {**(kwargs or {})}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        empty_args = tree_map_only(Recorded, _empty, args)
        empty_kwargs = {**tree_map_only(Recorded, _empty, kwargs)}
        if "device" in kwargs:
            empty_kwargs["device"] = torch.device("meta")
        result = func(*empty_args, **empty_kwargs)
        if isinstance(result, Tensor):
            return Recorded(_step(func, args, kwargs, result, None))
        if isinstance(result, list | tuple):
            parts = [Recorded(_step(func, args, kwargs, part, i)) for i, part in enumerate(result)]
            return type(result)(parts)
        return result


@dataclass(frozen=True, eq=False)
class Computed:
    """A weight that an operator makes of others: experts that are stacked, halves that are joined."""

    make: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file_range = None

    def rows(self, start: int, stop: int) -> Tensor:
        return self.load()[start:stop]

    def load(self) -> Tensor:
        return self.make()


@dataclass(frozen=True, eq=False)
class Joined:
    """Weights one after the other along `dim`, or (`stacked`) along a new axis there. Rows need but some."""

    parts: tuple[Weight, ...]
    dim: int
    stacked: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    file_range = None

    def rows(self, start: int, stop: int) -> Tensor:
        out = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        at = 0
        for part in self.parts:
            if self.dim > 0:  # rows of the whole are rows of each part
                piece = part.rows(start, stop)
                piece = piece.unsqueeze(self.dim) if self.stacked else piece
                out.narrow(self.dim, at, piece.shape[self.dim]).copy_(piece)
                at += piece.shape[self.dim]
                continue
            size = 1 if self.stacked else part.shape[0]
            first, last = max(start, at), min(stop, at + size)
            if first < last:
                rows = part.load()[None] if self.stacked else part.rows(first - at, last - at)
                out[first - start : last - start].copy_(rows)
            at += size
        return out

    def load(self) -> Tensor:
        return self.rows(0, self.shape[0])


def _equal(one: Recorded, other: Recorded) -> bool:
    """`torch.equal`, some rows at a time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    count, first, second = len(one), one.weight, other.weight
    step = max(1, _VALUES * count // max(1, one.numel()))
    blocks = ((at, min(at + step, count)) for at in range(0, count, step))
    return all(torch.equal(first.rows(*block), second.rows(*block)) for block in blocks)


def _empty(tensor: Recorded) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _step(func: Any, args: Any, kwargs: dict[str, Any], result: Tensor, index: int | None) -> Weight:
    """The weight that `func` makes; the `index`-th of what it returns, if that is several."""
    first = args[0] if args and isinstance(args[0], Recorded) else None
    shape = tuple(result.shape)
    if first is not None and shape == tuple(first.shape):
        whole_slice = func is torch.ops.aten.slice.Tensor  # of the same shape: [...] or [:]
        same_view = func in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        if func in _NOTHING or whole_slice or same_view:
            if result.dtype == first.dtype:
                return first.weight
            return Converted(first.weight, result.dtype)
    if func in _JOINS and all(isinstance(part, Recorded) for part in args[0]):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % result.dim()
        parts = tuple(part.weight for part in args[0])
        return Joined(parts, dim, func is torch.ops.aten.stack.default, shape, result.dtype)

    def make() -> Tensor:
        real = tree_map_only(Recorded, lambda tensor: tensor.weight.load(), (args, kwargs))
        out = func(*real[0], **real[1])
        return out if index is None else out[index]

    return Computed(make, shape, result.dtype)
