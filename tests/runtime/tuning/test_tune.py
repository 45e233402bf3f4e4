"""--tree auto: the model of cost and acceptance, the decision, and the whole on a bundle."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import GREEDY, request_of, run
from support.tinybundle import make_bundle

from eagle_run.decoding.config import AcceptanceRule
from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.engine.validation import EngineLimits
from eagle_run.params import SamplingParams
from eagle_run.tuning import tree_tuning as tune_module
from eagle_run.tuning.cost_model import (
    Costs,
    decide,
    dynamic_like,
    interpolate,
    rank_acceptance,
    rank_paths,
    shortlist,
    tokens_per_round,
)
from eagle_run.tuning.forward_time import fuse_seconds
from eagle_run.tuning.tree_tuning import auto_tree, tune

PLAIN, CHAIN, WIDE = TreeShape.plain(), TreeShape.chain(2), TreeShape.dynamic(4, 4, 53)
FLAT = Costs(target={1: 10e-3, 64: 10e-3}, draft={1: 1e-4, 8: 1e-4}, glue=(0.0, 0.0))
STEEP = Costs(target={1: 10e-3, 64: 640e-3}, draft={1: 1e-3, 8: 8e-3}, glue=(0.0, 0.0))


def test_interpolation() -> None:
    known = {1: 10.0, 2: 12.0, 4: 20.0}
    assert [interpolate(known, size) for size in (1, 2, 3, 4)] == [10, 12, 16, 20]
    assert interpolate(known, 6) == 28  # along the last two
    assert interpolate({4: 7.0}, 9) == 7


def test_a_round_costs_prime_levels_and_verification() -> None:
    costs = Costs(target={1: 10, 8: 80}, draft={1: 1, 8: 8}, glue=(0.5, 0.25))
    assert costs.round(PLAIN) == 10 + 0.5
    assert costs.round(CHAIN) == pytest.approx(30 + 3 + 1 + 0.5 + 2 * 0.25)
    # prime of 3 rows, then levels of 2 and 2 rows
    assert costs.round(TreeShape.dynamic(3, 2, 6)) == pytest.approx(60 + 4 + 2 + 2 + 0.5 + 3 * 0.25)


def test_the_fuse_graph_is_charged_once_a_round() -> None:
    without = Costs(target={1: 10, 8: 80}, draft={1: 1, 8: 8}, glue=(0.5, 0.25))
    costs = replace(without, fuse={2: 200.0, 4: 400.0})
    assert costs.round(PLAIN) == without.round(PLAIN)
    for shape, rows in ((CHAIN, 3), (TreeShape.dynamic(3, 2, 6), 4)):  # of its prime
        assert costs.round(shape) == pytest.approx(without.round(shape) + 100 * rows)


def test_the_fuse_graph_is_timed_where_there_is_one(tiny_bundle: Path, built_bundle: Path) -> None:
    assert fuse_seconds(load_engine(tiny_bundle, threads=1).runner, capture=False) == {}
    found = fuse_seconds(load_engine(built_bundle, threads=1).runner, capture=False)
    assert set(found) == {2, 4, 8}
    assert min(found.values()) > 0


def test_rank_paths() -> None:
    assert rank_paths((-1, 0, 0, 1, 2, 1)) == [(), (0,), (1,), (0, 0), (1, 0), (0, 1)]


paths = st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), min_size=1, max_size=30)


@given(paths, st.integers(2, 20))
def test_expected_tokens_are_what_a_walk_gives(taken: list[tuple[int, ...]], nodes: int) -> None:
    shape = best_static(4, 4, nodes)
    table = shape.table or ()

    def walk(path: tuple[int, ...]) -> int:
        node = 0
        for depth, rank in enumerate(path):
            children = [child for child, parent in enumerate(table) if parent == node]
            if rank >= len(children):
                return depth
            node = children[rank]
        return len(path)

    expected = 1 + sum(walk(path) for path in taken) / len(taken)
    assert tokens_per_round(shape, taken) == pytest.approx(expected)


@given(paths)
def test_rank_acceptance_fits_best_static(taken: list[tuple[int, ...]]) -> None:
    ranks = rank_acceptance(taken, depth=4, top_k=4)
    assert all(0 < share <= 1 for share in ranks)
    assert all(a >= b for a, b in itertools.pairwise(ranks))
    assert sum(ranks) <= 1


def test_rank_acceptance_counts_visits() -> None:
    # Three visits of the first (two accepted, one stop), one of the second; the last is as deep as can be.
    ranks = rank_acceptance([(0, 0), (), (1, 0)], depth=2, top_k=2)
    assert ranks == pytest.approx((3.5 / 7, 1.5 / 7))


def test_dear_rows_give_small_trees_and_cheap_rows_large_ones() -> None:
    taken = [(0, 0, 0), (0,), (1, 0), (), (0, 1), (2,), (0, 0), ()] * 4
    small = shortlist(STEEP, taken, seen=WIDE, max_nodes=64, keep=3)
    large = shortlist(FLAT, taken, seen=WIDE, max_nodes=64, keep=3)
    assert len(small) == len({shape.nodes for shape in small}) == 3
    assert small[0].nodes <= 3 < large[0].nodes
    assert all(shape.nodes <= 6 for shape in shortlist(FLAT, taken, seen=WIDE, max_nodes=6, keep=3))


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        (
            best_static(4, 4, 64),
            TreeShape.dynamic(4, 4, 53),
        ),  # more nodes than the dynamic one has candidates
        (best_static(3, 2, 12), TreeShape.dynamic(3, 2, 11)),
        (best_static(3, 2, 6), TreeShape.dynamic(3, 2, 6)),
        (TreeShape.chain(3), TreeShape.dynamic(3, 2, 4)),
    ],
)
def test_the_dynamic_tree_of_a_fixed_ones_sizes(fixed: TreeShape, expected: TreeShape) -> None:
    assert dynamic_like(fixed) == expected


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({}, (PLAIN, 1.0)),
        ({CHAIN: [0.9, 0.95, 1.0]}, (PLAIN, 1.0)),
        ({CHAIN: [1.01, 1.01, 1.01]}, (PLAIN, 1.0)),  # within the margin
        ({CHAIN: [1.2, 1.2, 1.2, 0.9, 0.9]}, (PLAIN, 1.0)),  # not on enough of the pairs
        ({CHAIN: [1.1, 1.1, 1.1, 0.9]}, (CHAIN, 1.1)),
        ({CHAIN: [1.1, 1.1], WIDE: [1.3, 1.2]}, (WIDE, 1.25)),
    ],
)
def test_the_winner_must_win_clearly(ratios: Any, expected: Any) -> None:
    tree, speedup = decide(ratios)
    assert (tree, speedup) == (expected[0], pytest.approx(expected[1]))


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Engine:
    return load_engine(tiny_bundle, threads=1)


@pytest.mark.parametrize("rule", ["topk", "sampled"])
def test_tuning_runs_and_does_not_disturb_decoding(engine: Engine, rule: str) -> None:
    request = request_of(engine, "hello", max_new_tokens=12)
    before = run(engine, [request], CHAIN).token_ids
    choice = tune(
        engine,
        params=SamplingParams(temperature=0.5, seed=2),
        acceptance=AcceptanceRule(rule),
        seconds=0.2,
    )
    assert choice.reason
    assert choice.tree == PLAIN or choice.speedup >= 1.02
    assert run(engine, [request], CHAIN).token_ids == before


def test_flat_costs_give_entrants_of_the_largest_size(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [path for depth in range(5) for path in itertools.product(range(4), repeat=depth)]
    flat = {"target": FLAT.target, "draft": FLAT.draft}
    monkeypatch.setattr(tune_module, "forward_seconds", lambda _session, graph, _most, **_: flat[graph])
    monkeypatch.setattr(tune_module, "_survey", lambda *_: (taken, [0.0]))
    requests = tune_module._requests(engine, SamplingParams(temperature=0))
    entrants = tune_module._entrants(engine, requests, AcceptanceRule.TOPK, 0.1)
    assert entrants[0].nodes == 64
    assert {TreeShape.dynamic(3, 4, 37), engine.default_tree} <= set(entrants)  # 37: all its candidates


def short(engine: Engine, max_seq_len: int, chunk: int = 16) -> Engine:
    """The same engine with another context."""
    return Engine(
        engine.runner,
        EngineLimits(max_seq_len, chunk, engine.limits.max_tree_nodes),
        tokenizer=engine.tokenizer,
        bundle=engine.bundle,
    )


def test_a_context_shorter_than_the_wide_tree_is_measured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "_PROMPTS", ("hi",))
    monkeypatch.setattr(tune_module, "_wide_tree", lambda *_: WIDE)
    small = short(engine, 48)
    ((request,),) = tune_module._requests(small, SamplingParams(temperature=0))
    assert len(request.prompt_token_ids) + WIDE.cache_rows > 48
    choice = tune(small, params=GREEDY, seconds=0.2)
    assert "measured in" in choice.reason


def test_where_nothing_can_be_measured_plain_decoding_is_taken(engine: Engine) -> None:
    full = short(engine, engine.runner.cache_rows - 1, chunk=1)
    choice = tune(full, params=GREEDY, seconds=0.2)
    assert (choice.tree, choice.speedup) == (PLAIN, 1.0)
    assert "no room" in choice.reason


def test_a_survey_without_a_round_ends_at_once(engine: Engine) -> None:
    requests = tune_module._requests(engine, SamplingParams(temperature=0))
    start = time.perf_counter()
    assert tune_module._survey(engine, requests, TreeShape.dynamic(9, 9, 400), 60) == ([], [])
    assert time.perf_counter() - start < 30


def test_the_choice_is_remembered_per_way_of_sampling(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[SamplingParams] = []

    def pretend(engine: Engine, *, params: SamplingParams, acceptance: str) -> tune_module.Choice:
        measured.append(params)
        return tune_module.Choice(TreeShape.static((-1, 0, 0, 1)), 1.5, "because")

    monkeypatch.setattr(tune_module, "tune", pretend)
    lines: list[str] = []
    first = auto_tree(engine, params=GREEDY, log=lines.append)
    again = auto_tree(engine, params=SamplingParams(temperature=0, seed=9), log=lines.append)
    assert again.tree == first.tree == TreeShape.static((-1, 0, 0, 1))
    assert len(measured) == 1
    assert "static:0,0,1" in lines[-1]
    assert "because" in lines[-1]
    auto_tree(engine, params=SamplingParams(temperature=1.0))
    auto_tree(engine, params=GREEDY, retune=True)
    assert len(measured) == 3
    known = json.loads((tmp_path / "eagle-run" / "trees.json").read_text())
    assert len(known) == 2


@pytest.mark.parametrize("content", ["not json", "[]", '{"KEY": {"tree": "oak"}}', '{"KEY": 3}'])
def test_a_spoilt_memory_is_measured_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune_module, "tune", lambda *_, **__: tune_module.Choice(CHAIN, 1.5, "measured"))
    monkeypatch.setattr(tune_module, "_key", lambda *_: "KEY")
    (tmp_path / "eagle-run").mkdir()
    (tmp_path / "eagle-run/trees.json").write_text(content)
    assert auto_tree(engine, params=GREEDY).reason == "measured"
    assert auto_tree(engine, params=GREEDY).reason == "remembered: measured"


def test_without_a_head_nothing_is_measured(tmp_path: Path) -> None:
    engine = load_engine(make_bundle(tmp_path / "bare", head=False), threads=1)
    assert auto_tree(engine, params=GREEDY).tree == PLAIN
