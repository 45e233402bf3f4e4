"""Weights of a graph as they are written: in blocks of rows, converted on the way, one tensor at a time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from eagle_export.checkpoints.stored import FileRange, is_finite
from eagle_run.dtypes import BY_ONNX, dtype_of
from eagle_run.errors import EagleError

_BLOCK = 8 << 20  # bytes of a block: what a conversion holds beside the tensor that it reads


class Weight(Protocol):
    """A weight that can be had when it is needed, in the type in which it is stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def file_range(self) -> FileRange | None:
        """Its bytes in a file, if they are there as they are."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis, contiguous or not. `load` is all of them at once."""

    def load(self) -> Tensor:
        """The whole tensor."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """A weight that a torch tensor holds."""

    tensor: Tensor
    file_range = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor.detach()[start:stop]

    def load(self) -> Tensor:
        return self.tensor.detach()


@dataclass(frozen=True, eq=False)
class Converted:
    """A weight in another type. Types are passed through one by one, since each rounds."""

    source: Weight
    dtype: torch.dtype
    file_range = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.rows(start, stop).to(self.dtype)

    def load(self) -> Tensor:
        return self.source.load().to(self.dtype)


Rows = Callable[[int, int], Tensor]


class Blocks(ir.LazyTensor):
    """An initializer that is made block by block while it is written, and held by nobody."""

    def __init__(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        super().__init__(self._whole, ir.DataType(dtype_of(dtype).onnx), ir.Shape(shape), name=name)
        self.torch_dtype = dtype
        self.sizes = tuple(shape)

    @abstractmethod
    def blocks(self) -> Iterator[Tensor]:
        """Contiguous tensors of this dtype that make up the whole, in order, along the first axis."""

    def tobytes(self) -> bytes:
        return b"".join(_bytes(block) for block in self.blocks())

    def tofile(self, file: Any) -> None:
        for block in self.blocks():
            file.write(_bytes(block))

    def _whole(self) -> ir.TensorProtocol:
        whole = torch.empty(self.sizes, dtype=self.torch_dtype)
        flat, at = whole.view(-1), 0
        for block in self.blocks():
            flat[at : at + block.numel()] = block.reshape(-1)
            at += block.numel()
        return ir.tensor(as_numpy(whole), dtype=self.dtype, name=self.name)


class Streamed(Blocks):
    """Weights, each with its axes permuted, side by side along their last axis, in one type.

    parts: (weight, permutation or None), all alike but for their last axis. A part whose first axis is
    another one is held whole, in its stored type, while the tensor is written; of others a block is read.
    """

    def __init__(
        self, name: str, parts: Sequence[tuple[Weight, tuple[int, ...] | None]], dtype: torch.dtype
    ) -> None:
        self.parts = tuple((_unconverted(weight, dtype), axes) for weight, axes in parts)
        shapes = [
            weight.shape if axes is None else tuple(weight.shape[i] for i in axes) for weight, axes in parts
        ]
        shape = shapes[0]
        if len(parts) > 1:
            shape = (*shapes[0][:-1], sum(other[-1] for other in shapes))
        super().__init__(name, dtype, shape)
        self._widths = [other[-1] if other else 1 for other in shapes]

    @property
    def file_range(self) -> FileRange | None:
        """Where a file holds exactly this."""
        (weight, axes), *others = self.parts
        same = not others and axes is None and weight.dtype == self.torch_dtype
        return weight.file_range if same else None

    def permuted(self, name: str, axes: tuple[int, ...]) -> Streamed:
        """This tensor with its axes in another order; it must have one part."""
        ((weight, before),) = self.parts
        order = axes if before is None else tuple(before[i] for i in axes)
        plain = order == tuple(range(len(order)))
        return Streamed(name, [(weight, None if plain else order)], self.torch_dtype)

    def blocks(self) -> Iterator[Tensor]:
        if not self.sizes:
            yield self._joined([self.parts[0][0].load()])
            return
        yield from self._blocks(self.open())

    def open(self) -> Rows:
        """Reads what must be held; the function it returns makes rows [start, stop) of the result."""
        readers = [_reader(weight, axes) for weight, axes in self.parts]
        return lambda start, stop: self._joined([read(start, stop) for read in readers])

    def steps(self) -> Iterator[tuple[int, int]]:
        """The (start, stop) of each block."""
        count = self.sizes[0]
        step = max(1, _BLOCK * count // max(1, math.prod(self.sizes) * self.torch_dtype.itemsize))
        for start in range(0, count, step):
            yield start, min(count, start + step)

    def _blocks(self, rows: Rows) -> Iterator[Tensor]:
        for start, stop in self.steps():
            yield rows(start, stop)

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The same rows of each part, in the type of the whole, side by side and contiguous."""
        if all(piece.dim() == 2 and piece.stride(0) == 1 < piece.shape[1] for piece in pieces):
            # Columns of what is stored. To convert along its rows and to turn the result costs a third of
            # doing both at once: either reads or writes neighbours.
            turned = torch.empty((sum(self._widths), pieces[0].shape[0]), dtype=self.torch_dtype)
            for part, piece in zip(turned.split(self._widths), pieces, strict=True):
                part.copy_(piece.t())
            out = turned.t().contiguous()
        elif len(pieces) == 1:
            out = pieces[0].to(self.torch_dtype).contiguous()
        else:
            out = torch.empty((len(pieces[0]), *self.sizes[1:]), dtype=self.torch_dtype)
            for part, piece in zip(out.split(self._widths, dim=-1), pieces, strict=True):
                part.copy_(piece)
        if not is_finite(out):
            self._refuse(pieces)
        return out

    def check_finite(self) -> None:
        """Reads all of it. Raises EagleError as writing it does: for values that are no finite numbers, and
        for those that are none any more in a narrower type."""
        for _ in self.blocks():
            pass

    def _refuse(self, pieces: Sequence[Tensor]) -> None:
        for (weight, _), piece in zip(self.parts, pieces, strict=True):
            if not is_finite(piece):
                raise EagleError(
                    f"{_stored_name(weight) or self.name} holds values that are not finite numbers",
                    hint="download the model again; if it is the same, its training failed",
                )
        raise EagleError(  # float16 ends at 65504: what is a number in a wider type is none there
            f"{self.name} holds values that fp16 cannot: it ends at 65504",
            hint="build in bf16 or fp32",
            parameters=["precision"],
        )


def stream(tensor: ir.TensorProtocol) -> Streamed:
    """An initializer as `Streamed`, whatever holds it; its values stay where they are."""
    if isinstance(tensor, Streamed):
        return tensor
    name, dtype = tensor.name or "", BY_ONNX[tensor.dtype].torch
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, Tensor):
        return Streamed(name, [(InMemory(raw), None)], dtype)
    return Streamed(name, [(InMemory(_as_torch(tensor)), None)], dtype)


def bind(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Gives every initializer that a trace left empty (on the meta device) the weight of its name.

    Raises EagleError for one that has none, or one of another shape.
    """
    for name, value in model.graph.initializers.items():
        raw = getattr(value.const_value, "raw", None)
        if not isinstance(raw, Tensor) or not raw.is_meta:
            continue
        weight = weights.get(name)
        if weight is None or weight.shape != tuple(raw.shape):
            held = "none" if weight is None else list(weight.shape)
            raise EagleError(f"the graph needs a weight {name} {list(raw.shape)}, found {held}")
        value.const_value = Streamed(name, [(weight, None)], raw.dtype)


def as_numpy(values: Tensor) -> np.ndarray:
    """A contiguous tensor as an array that shares its memory, also of types that NumPy itself lacks."""
    foreign = _foreign(values.dtype)
    if foreign is None:
        return values.numpy()
    width = torch.uint8 if values.dtype.itemsize == 1 else torch.int16
    return values.view(width).numpy().view(foreign)


def _foreign(dtype: torch.dtype) -> Any:
    """ml_dtypes' type for one that NumPy itself lacks; None for the others."""
    return getattr(ml_dtypes, dtype_of(dtype).name, None)


def _as_torch(tensor: ir.TensorProtocol) -> Tensor:
    dtype = BY_ONNX[tensor.dtype].torch
    array = np.ascontiguousarray(tensor.numpy())
    if _foreign(dtype) is not None:
        width = np.uint8 if dtype.itemsize == 1 else np.int16
        return torch.from_numpy(array.view(width)).view(dtype)
    return torch.from_numpy(array)


def _unconverted(weight: Weight, dtype: torch.dtype) -> Weight:
    """What is converted to `dtype` while it is written need not be before."""
    return weight.source if isinstance(weight, Converted) and weight.dtype == dtype else weight


def _stored_name(weight: Weight) -> str:
    """What the checkpoint calls a weight; empty where it is not from one."""
    return _stored_name(weight.source) if isinstance(weight, Converted) else getattr(weight, "name", "")


def _reader(weight: Weight, axes: tuple[int, ...] | None) -> Rows:
    if axes is None:
        return weight.rows
    if axes[0] == 0:  # such as the matrices of experts, each transposed
        return lambda start, stop: weight.rows(start, stop).permute(axes)
    whole = weight.load().permute(axes)
    return lambda start, stop: whole[start:stop]


def _bytes(block: Tensor) -> memoryview:
    return block.reshape(-1).view(torch.uint8).numpy().data
