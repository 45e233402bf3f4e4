"""The comparison of graphs notices what it is there to notice, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from support.tiny import modules_of
from torch import Tensor

from eagle_export.reference.modules import eager_graphs
from eagle_export.verify.parity import LIMITS, compare, row_dependence
from eagle_run.backends.base import Graph, Run
from eagle_run.bundle.tensors import GraphSpec

ROWS = 64


class Faulty:
    """A graph whose outputs something happens to."""

    def __init__(self, graph: Graph, fault: Callable[[Mapping[str, Tensor]], None]) -> None:
        self.graph = graph
        self.fault = fault

    @property
    def spec(self) -> GraphSpec:
        return self.graph.spec

    def bind(self, tensors: Mapping[str, Tensor], *, shared: bool = False) -> Run:
        inner = self.graph.bind(tensors)

        def run() -> None:
            inner()
            self.fault(tensors)

        return run


@pytest.fixture(scope="module")
def graphs(tiny_target: Path, tiny_head: Path) -> dict[str, Graph]:
    return eager_graphs(modules_of(tiny_target, tiny_head), ROWS)


def test_equal_graphs_do_not_differ(graphs: dict[str, Graph]) -> None:
    found = {(d.graph, d.tensor): d.value for d in compare(graphs, graphs)}
    assert set(found) == {
        *(("target", name) for name in ("logits", "features", "cache")),
        ("fuse", "hidden"),
        *(("draft", name) for name in ("logits", "hidden_out", "cache")),
    }
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize(
    ("graph", "tensor"),
    [("target", "logits"), ("target", "features"), ("fuse", "hidden"), ("draft", "hidden_out")],
)
def test_a_wrong_output_shows_in_its_own_graph_alone(
    graph: str, tensor: str, graphs: dict[str, Graph]
) -> None:
    def shift(tensors: Mapping[str, Tensor]) -> None:
        tensors[tensor][0, -1, 0] += 0.5 * float(tensors[tensor].abs().max().clamp(min=1))

    found = compare({**graphs, graph: Faulty(graphs[graph], shift)}, graphs)
    assert {(d.graph, d.tensor) for d in found if d.value > LIMITS["fp32"]} == {(graph, tensor)}


def test_a_wrong_cache_shows(graphs: dict[str, Graph]) -> None:
    def skip(tensors: Mapping[str, Tensor]) -> None:
        tensors["present_value.1"][1].zero_()

    found = compare({**graphs, "target": Faulty(graphs["target"], skip)}, graphs)
    assert ("target", "cache") in {(d.graph, d.tensor) for d in found if d.value > LIMITS["fp32"]}


def test_rows_of_a_sound_graph_are_independent(graphs: dict[str, Graph]) -> None:
    assert row_dependence(graphs["target"]) <= 1e-5


def _shared_scale(tensors: Mapping[str, Tensor]) -> None:
    """As dynamic quantisation does: a scale taken over all rows of the forward, then rounding."""
    logits = tensors["logits"]
    step = logits.abs().amax() / 127
    logits.copy_((logits / step).round() * step)


def _leaking_mask(tensors: Mapping[str, Tensor]) -> None:
    """The last row's token changes every row."""
    tensors["logits"] += 0.01 * tensors["input_ids"][:, -1, None, None].float()


@pytest.mark.parametrize("fault", [_shared_scale, _leaking_mask])
def test_rows_that_depend_on_each_other_are_noticed(
    fault: Callable[[Mapping[str, Tensor]], None], graphs: dict[str, Graph]
) -> None:
    torch.manual_seed(0)
    assert row_dependence(Faulty(graphs["target"], fault)) > LIMITS["fp32"]
