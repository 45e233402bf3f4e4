"""In fp8 no forward is of one row: what plain decoding sees is bit for bit what a longer forward sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle_run.backends.base import Graph, Run
from eagle_run.backends.padding import PaddedGraph
from eagle_run.engine.loading import load_engine
from eagle_run.engine.model_runner import Forward, ModelRunner
from eagle_run.engine.prefill import fill

KV = 32


@pytest.fixture(scope="module")
def runner(built_bundle: Path) -> ModelRunner:
    """A runner that takes its graphs for FP8 ones; the padding does not ask what is in them."""
    graphs = load_engine(built_bundle).runner.graphs
    return ModelRunner(graphs, batch=1, draft_to_target=torch.arange(60), precision="fp8")


def forward(runner: ModelRunner, tokens: Tensor) -> Forward:
    """The target over tokens i64 [T] at the start of the cache, causally."""
    rows = len(tokens)
    there = runner.target(rows, rows, KV)
    step = torch.arange(rows)
    fill(
        there.inputs,
        input_ids=tokens[None],
        position_ids=step[None],
        write_index=torch.zeros(1, dtype=torch.int64),
        logits_index=step[None],
        tree_mask=(torch.arange(KV) <= step[:, None])[None, None],
    )
    there.run()
    return there


def test_one_row_is_shown_and_two_are_run(runner: ModelRunner) -> None:
    lone = runner.target(1, 1, KV)
    assert isinstance(runner.graphs["target"], PaddedGraph)
    assert lone.inputs["input_ids"].shape == (1, 1)
    assert lone.inputs["tree_mask"].shape == (1, 1, 1, KV)
    assert lone.outputs["logits"].shape[:2] == (1, 1)
    assert lone.outputs["features"].shape[:2] == (1, 1)
    assert not isinstance(runner.graphs["draft"], PaddedGraph)  # the draft only proposes
    assert len({id(f) for f in (lone, runner.target(1, 1, KV))}) == 1


class RowCounter:
    """A graph that notes how many rows each binding has."""

    capturable = True

    def __init__(self, graph: Graph) -> None:
        self.spec = graph.spec
        self.rows: list[int] = []
        self._graph = graph

    def bind(self, tensors: Mapping[str, Tensor], *, shared: bool = False) -> Run:
        self.rows.append(tensors["input_ids"].shape[1])
        return self._graph.bind(tensors, shared=shared)


@pytest.mark.parametrize("min_rows", [1, 2, 4])
def test_a_padded_graph_runs_as_many_rows_as_it_must(built_bundle: Path, min_rows: int) -> None:
    counter = RowCounter(load_engine(built_bundle).runner.graphs["target"])
    runner = ModelRunner({"target": PaddedGraph(counter, min_rows)}, batch=1)
    for rows in (1, 2, 3, 5):
        forward(runner, torch.arange(10, 10 + rows))
    assert counter.rows == [max(rows, min_rows) for rows in (1, 2, 3, 5)]


def test_a_lone_row_equals_the_first_of_many(runner: ModelRunner) -> None:
    tokens = torch.tensor([5, 9, 11, 7])
    alone = forward(runner, tokens[:1])
    logits, features = alone.outputs["logits"].clone(), alone.outputs["features"].clone()
    assert torch.isfinite(logits).all()
    many = forward(runner, tokens)
    assert torch.equal(logits[0, 0], many.outputs["logits"][0, 0])
    assert torch.equal(features[0, 0], many.outputs["features"][0, 0])
    again = forward(runner, tokens[:1])  # after forwards that share its buffers
    assert torch.equal(again.outputs["logits"], logits)


def test_other_precisions_run_one_row_as_one(built_bundle: Path) -> None:
    runner = load_engine(built_bundle).runner
    assert not isinstance(runner.graphs["target"], PaddedGraph)
