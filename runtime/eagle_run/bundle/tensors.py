"""The signature of a graph: its inputs and outputs by name, dtype and shape. Needs no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from eagle_run.dtypes import GRAPH_DTYPES


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph. `shape` holds sizes, or names for dynamic axes (B, T, R, KV).

    Raises ValueError for a dtype that no graph has.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}  # as a part of a manifest

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if self.dtype not in GRAPH_DTYPES:
            raise ValueError(f"dtype should be one of {', '.join(GRAPH_DTYPES)}, found {self.dtype!r}")


@dataclass(frozen=True)
class GraphSpec:
    """The whole signature of a graph: `name` is target, fuse or draft."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def tensor(self, name: str) -> TensorSpec:
        """The input or output of that name; KeyError where there is none."""
        for tensor in (*self.inputs, *self.outputs):
            if tensor.name == name:
                return tensor
        raise KeyError(name)
