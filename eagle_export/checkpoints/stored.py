"""Tensors of safetensors files, read when they are needed, whole or some rows at a time."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle_export.checkpoints import weights
from eagle_run.dtypes import BY_SAFETENSORS
from eagle_run.errors import EagleError

_ROWS = 8 << 20  # values that are looked at at a time
_AGAIN = "download the model again; the file may be damaged or cut short"


@dataclass(frozen=True)
class FileRange:
    """Where a file holds the values of a tensor, row by row and without gaps."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: `offset` is that of its first byte in the file.

    Files are read, not mapped: pages of a mapped file count as this process's memory.
    """

    file: Path
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def file_range(self) -> FileRange | None:
        """None where the values do not start at a multiple of their size, which some readers want."""
        if self.offset % self.dtype.itemsize:
            return None
        return FileRange(self.file, self.offset, math.prod(self.shape) * self.dtype.itemsize)

    def load(self) -> Tensor:
        return self._read(0, math.prod(self.shape)).view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        width = math.prod(self.shape[1:])
        return self._read(start * width, stop * width).view(stop - start, *self.shape[1:])

    def _read(self, start: int, stop: int) -> Tensor:
        """Values [start, stop), counted over the whole tensor."""
        size = self.dtype.itemsize
        out = torch.empty((stop - start) * size, dtype=torch.uint8)
        view = out.numpy().data
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset + start * size)
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except OSError as error:
            raise EagleError(f"{self.file}: cannot be read: {error.strerror}", hint=_AGAIN) from error
        if view:
            raise EagleError(f"{self.file} ends within {self.name}", hint=_AGAIN)
        return out.view(self.dtype)


def marked(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, which know from now on where they are from."""
    for name, stored in stored_tensors(file).items():
        tensors[name].__dict__["stored"] = stored
    return tensors


def stored_tensor_of(tensor: Tensor) -> StoredTensor | None:
    """Where a tensor is from that was `marked` and has not gone through any operation since."""
    stored: StoredTensor | None = tensor.__dict__.get("stored")
    return stored


def largest(values: Tensor) -> float:
    """The largest magnitude, of at least one value; nan where one is nan. Ten times as fast as `isfinite`."""
    low, high = torch.aminmax(values)
    return float(torch.maximum(-low, high))


def is_finite(values: Tensor) -> bool:
    """Whether no value is inf or nan, of any type that weights are stored in."""
    if not values.numel() or not values.dtype.is_floating_point:
        return True
    if values.dtype.itemsize == 1:  # torch compares no FP8 numbers
        values = values.float()
    return math.isfinite(largest(values))


def all_finite(tensor: Tensor) -> bool:
    """`is_finite`, looked at some rows at a time."""
    if tensor.dim() == 0 or not tensor.numel():
        return is_finite(tensor)
    source = stored_tensor_of(tensor)
    step = max(1, _ROWS * tensor.shape[0] // tensor.numel())
    for start in range(0, tensor.shape[0], step):
        stop = min(tensor.shape[0], start + step)
        rows = tensor[start:stop] if source is None else source.rows(start, stop)
        if not is_finite(rows):
            return False
    return True


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file by name, from its header. Raises EagleError for a damaged one."""
    try:
        header = weights.read_header(file)
        with file.open("rb") as stream:
            start, size = 8 + int.from_bytes(stream.read(8), "little"), os.fstat(stream.fileno()).st_size
        tensors = {}
        for name, entry in header.items():
            if (dtype := BY_SAFETENSORS.get(entry["dtype"])) is None:
                raise EagleError(
                    f"{file}: {name} is stored as {entry['dtype']}, which is not known",
                    hint="use a checkpoint in 16 or 32 bit, or in FP8",
                )
            first, last = entry["data_offsets"]
            tensor = StoredTensor(file, name, start + first, tuple(entry["shape"]), dtype.torch)
            if math.prod(tensor.shape) * tensor.dtype.itemsize != last - first:
                raise ValueError(f"{name} has {last - first} bytes, its shape takes another number")
            if start + last > size:
                raise ValueError(f"it ends within {name}")
            tensors[name] = tensor
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EagleError(f"{file}: not a whole safetensors file: {error}", hint=_AGAIN) from None
    return tensors
