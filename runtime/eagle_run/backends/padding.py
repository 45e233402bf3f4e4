"""A graph whose forwards never have fewer rows than it can take: PaddedGraph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from eagle_run.backends.base import Graph, Run
from eagle_run.backends.checks import check_tensors
from eagle_run.bundle.tensors import GraphSpec

if TYPE_CHECKING:
    import torch

_ROW_AXES = ("T", "R")
# Backends have other kernels for a single row (in attention, whatever the batch), which sum in another
# order. Rounding to FP8 makes such a last bit grow until plain decoding and a draft answer differently; with
# two rows a sequence, products agree bit for bit.
MIN_ROWS = {"fp8": 2}


class PaddedGraph:
    """`graph` with at least `min_rows` rows a sequence in every forward: what is missing is added.

    An added row is token 0 at position 0. It sees the first row of the cache (a row that sees nothing would
    be NaN), writes its keys and values behind the rows that were asked for, where a later forward overwrites
    them, and its outputs are dropped.
    """

    def __init__(self, graph: Graph, min_rows: int) -> None:
        self.graph = graph
        self.min_rows = min_rows

    @property
    def spec(self) -> GraphSpec:
        return self.graph.spec

    @property
    def capturable(self) -> bool:
        return self.graph.capturable

    def bind(self, tensors: Mapping[str, torch.Tensor], *, shared: bool = False) -> Run:
        """As `Graph.bind`; a binding with too few rows runs on padded copies, in and out."""
        sizes = check_tensors(self.spec, tensors)
        if sizes["T"] >= self.min_rows:
            return self.graph.bind(tensors, shared=shared)
        missing = dict.fromkeys(_ROW_AXES, self.min_rows)
        padded, views = dict(tensors), {}
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            if missing.keys() & set(tensor.shape):
                given = tensors[tensor.name]
                shape = [
                    missing.get(str(axis), size) for axis, size in zip(tensor.shape, given.shape, strict=True)
                ]
                padded[tensor.name] = views[tensor.name] = given.new_zeros(shape)
                for axis, size in enumerate(given.shape):
                    views[tensor.name] = views[tensor.name].narrow(axis, 0, size)
        padded["tree_mask"][..., 0] = True
        run = self.graph.bind(padded, shared=shared)
        inputs = [(views[t.name], tensors[t.name]) for t in self.spec.inputs if t.name in views]
        outputs = [(tensors[t.name], views[t.name]) for t in self.spec.outputs if t.name in views]

        def padded_run() -> None:
            for view, given in inputs:
                view.copy_(given)
            run()
            for given, view in outputs:
                given.copy_(view)

        return padded_run


def padded_graph(graph: Graph, precision: str) -> Graph:
    """The graph as rounds of this precision need it."""
    min_rows = MIN_ROWS.get(precision, 1)
    return graph if min_rows == 1 else PaddedGraph(graph, min_rows)
