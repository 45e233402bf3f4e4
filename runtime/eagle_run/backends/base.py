"""The seam between the round and whatever runs a graph: named, caller-owned tensors in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from eagle_run.bundle.tensors import GraphSpec

if TYPE_CHECKING:
    import torch

Run = Callable[[], None]


class Graph(Protocol):
    """A compiled or interpreted graph (ONNX Runtime session, TensorRT engine, eager module).

    `bind` is called once per set of shapes and does all that is slow: checking names, dtypes and shapes,
    building the binding. The function it returns is called once per forward: it reads the bound inputs,
    writes the bound outputs, allocates nothing and waits for nothing, so that it can be captured.
    `past_*` and `present_*` of one layer are bound to the same tensor.

    `capturable`: a run may be recorded into a CUDA graph, once it has run before; a backend may find out when
    it binds that it is not so. With `shared` a binding is one of many (of prompts) that are never captured: a
    backend may let them share what a capture would have to keep. On a GPU every run is enqueued on torch's
    current stream, which is that of `stream.py`.
    """

    @property
    def spec(self) -> GraphSpec: ...

    @property
    def capturable(self) -> bool: ...

    def bind(self, tensors: Mapping[str, torch.Tensor], *, shared: bool = False) -> Run: ...
