"""Rounds that are captured, and rounds that run ahead, give the tokens of rounds that do neither.

`OpRecorder` stands for the CUDA graph: what it replays are the operations of a round on the memory of the
round, without its Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.decoding import Answer, Request, answers_of
from support.opgraph import OpGraph, OpRecorder
from support.tiny import eager_engine, modules_of

from eagle_export.reference.modules import Modules
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.engine import Engine
from eagle_run.engine.offline import run_offline
from eagle_run.metrics import Metrics
from eagle_run.outputs import RequestOutput
from eagle_run.params import SamplingParams

SHAPES = {
    "plain": TreeShape.plain(),
    "dynamic": TreeShape.dynamic(3, 3, 10),
    "static": TreeShape.static((-1, 0, 0, 0, 1, 1, 4, 2)),
    "chain": TreeShape.chain(4),
}
GREEDY = [
    Request((7, 20, 33, 5, 61), max_new_tokens=40),
    Request(tuple(range(10, 40)), max_new_tokens=9),
    Request((12,), max_new_tokens=25),
    Request((3,) * 17, max_new_tokens=1),
    Request(tuple(range(50, 70)), max_new_tokens=30),
]
MIXED = [
    replace(request, sampling=sampling)
    for request, sampling in zip(
        GREEDY,
        [
            SamplingParams(temperature=0),
            SamplingParams(temperature=1.0, seed=11),
            SamplingParams(temperature=0.8, top_p=0.9, seed=5),
            SamplingParams(temperature=0.9, top_k=7, seed=6),
            SamplingParams(temperature=1.3, min_p=0.02, seed=4),
        ],
        strict=True,
    )
]


@pytest.fixture(scope="module")
def modules(tiny_target: Path, tiny_head: Path) -> Modules:
    return modules_of(tiny_target, tiny_head)


def recorded(modules: Modules, **how: object) -> tuple[Engine, CudaGraphRunner]:
    engine = eager_engine(modules, **how)  # type: ignore[arg-type]
    engine.cuda_graphs = CudaGraphRunner("cpu", recorder=OpRecorder())
    return engine, engine.cuda_graphs


@pytest.fixture(scope="module")
def wanted(modules: Modules) -> Callable[[str, str, list[Request]], list[Answer]]:
    """(shape's name, rule, requests) -> what each gives alone, uncaptured, computed once."""
    known: dict[tuple[str, str, int], list[Answer]] = {}

    def get(name: str, rule: str, requests: list[Request]) -> list[Answer]:
        key = (name, rule, id(requests))
        if key not in known:
            known[key] = one_by_one(modules, requests, SHAPES[name], rule)
        return known[key]

    return get


def one_by_one(modules: Modules, requests: list[Request], shape: TreeShape, rule: str) -> list[Answer]:
    engine = eager_engine(modules)
    return [answers_of(engine, [request], shape, rule=rule)[0] for request in requests]


@pytest.mark.parametrize(
    ("batch", "ahead"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        (3, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        (3, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "rule", "requests"),
    [
        ("plain", "topk", GREEDY),
        ("dynamic", "topk", GREEDY),
        ("dynamic", "topk", MIXED),
        ("static", "topk", MIXED),
        ("static", "sampled", MIXED),
        ("chain", "topk", GREEDY),
        ("chain", "sampled", MIXED),
    ],
)
def test_replayed_rounds_give_the_same_tokens(
    *,
    name: str,
    rule: str,
    requests: list[Request],
    batch: int,
    ahead: bool,
    modules: Modules,
    wanted: Callable[[str, str, list[Request]], list[Answer]],
) -> None:
    shape, alone = SHAPES[name], wanted(name, rule, requests)
    engine, rounds = recorded(modules, batch=batch)
    engine.async_scheduling = ahead
    assert answers_of(engine, requests, shape, rule=rule) == alone
    assert rounds.replays > rounds.calls
    before = rounds.captured
    assert answers_of(engine, requests, shape, rule=rule) == alone  # and all of it again, replayed
    assert rounds.captured == before


def test_other_settings_need_no_other_capture(modules: Modules) -> None:
    """Temperature, top-p and seed are read from device memory by the rounds that were captured."""
    shape, base = SHAPES["dynamic"], SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    engine, rounds = recorded(modules)
    answers_of(engine, [replace(GREEDY[0], sampling=base)], shape)
    captured, calls = rounds.captured, rounds.calls
    answers = []
    for sampling in (
        SamplingParams(temperature=0.6, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, top_p=0.5, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2),
        base,
    ):
        request = replace(GREEDY[0], sampling=sampling)
        (answer,) = answers_of(engine, [request], shape)
        assert [answer] == one_by_one(modules, [request], shape, "topk")
        answers.append(answer.tokens)
    assert len(set(answers)) == 4
    assert (rounds.captured, rounds.calls) == (captured, calls)


@pytest.mark.parametrize("name", SHAPES)
def test_running_ahead_costs_at_most_one_round_an_answer(name: str, modules: Modules) -> None:
    """An end of sequence is noticed one round late; a full answer is known beforehand."""
    shape = SHAPES[name]
    (whole,) = one_by_one(modules, [GREEDY[0]], shape, "topk")
    stop = replace(GREEDY[0], stop_tokens=frozenset({whole.tokens[20]}))
    for request, extra in ((stop, 1), (GREEDY[0], 1 if shape.levels else 0)):
        counts = []
        for ahead in (False, True):
            engine = eager_engine(modules)
            engine.async_scheduling = ahead
            (answer,) = answers_of(engine, [request], shape, metrics=(metrics := Metrics()))
            counts.append((answer, metrics.rounds, metrics.emitted, engine.cuda_graphs.calls))
        (first, *same, calls), (second, *again, more) = counts
        assert first == second
        assert same == again  # the round that was too many is in no figure
        assert calls <= more <= calls + extra


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_running_ahead_stays_inside_the_caches(batch: int, modules: Modules) -> None:
    """The round too many of an answer that filled the context: its slot has retired itself by then."""
    shape = SHAPES["chain"]
    long, short = tuple(range(10, 40)), Request((12,), max_new_tokens=12)
    for room in range(1, 8):
        request = Request(long, max_new_tokens=60)
        most, behind = len(long) + room, max(16, shape.cache_rows)
        answers = []
        for ahead in (False, True):
            engine = eager_engine(modules, batch=batch, max_seq_len=most, extra_rows=behind)
            engine.async_scheduling = ahead
            answers.append(answers_of(engine, [request, short], shape))
        assert answers[0] == answers[1]
        assert len(answers[0][0].tokens) == room
        engine, _ = recorded(modules, batch=batch, max_seq_len=most, extra_rows=behind)
        for ahead in (False, False, True, True):  # rounds captured in step do not serve one that runs ahead
            engine.async_scheduling = ahead
            assert answers_of(engine, [request, short], shape) == answers[0]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_a_finished_slot_takes_the_next_request_while_others_go_on(ahead: bool, modules: Modules) -> None:
    shape = SHAPES["dynamic"]
    engine = eager_engine(modules, batch=2)
    engine.async_scheduling = ahead
    long = Request((7, 20, 33, 5, 61), max_new_tokens=60)
    short = [Request((n, n + 1, n + 2), max_new_tokens=6) for n in range(10, 50, 5)]
    order: list[int] = []
    begun = 0

    def note(number: int, output: RequestOutput) -> None:
        nonlocal begun
        if number not in order:
            order.append(number)
        if number == 0 and output.finished:
            begun = len(order)

    requests = [request.offline for request in [long, *short]]
    run_offline(engine, requests, SpeculativeConfig(shape), on_output=note)
    assert order == sorted(order)
    assert begun > 4  # while the long one was decoded, one short one after the other had its turn
    metrics = Metrics()
    assert answers_of(engine, [long, *short], shape, metrics=metrics) == one_by_one(
        modules, [long, *short], shape, "topk"
    )
    assert metrics.tokens == 60 + 6 * len(short)


def test_an_answer_left_in_the_middle_does_not_show(modules: Modules) -> None:
    engine, _ = recorded(modules, batch=2)
    engine.async_scheduling = True
    shape = SHAPES["dynamic"]
    for number, request in enumerate(GREEDY[:2]):
        engine.add_request(str(number), request.prompt, request.params, speculative=SpeculativeConfig(shape))
    for _ in range(4):
        engine.step()
    for number in range(2):
        assert engine.abort_request(str(number)) is not None
    assert answers_of(engine, GREEDY[2:3], shape) == one_by_one(modules, GREEDY[2:3], shape, "topk")


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_of_one_token_does_not_see_the_one_before(seed: int, modules: Modules) -> None:
    """It has no pending pair; drawn drafts are those of an engine that was never used."""
    request = Request((12 + seed,), SamplingParams(temperature=1.0, seed=seed), max_new_tokens=12)
    fresh, used = eager_engine(modules), eager_engine(modules)
    answers_of(used, GREEDY[:1], SHAPES["chain"], rule="sampled")
    wanted = answers_of(fresh, [request], SHAPES["chain"], rule="sampled")
    assert answers_of(used, [request], SHAPES["chain"], rule="sampled") == wanted


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("other", ["dynamic", "plain"])
def test_requests_join_others_with_their_own_tree(ahead: bool, other: str, modules: Modules) -> None:
    """With the same tree it starts at once in the free slot; with another when the slots are empty."""
    engine = eager_engine(modules, batch=2)
    engine.async_scheduling = ahead
    trees = {"first": SHAPES["dynamic"], "second": SHAPES[other]}
    asked = {"first": GREEDY[0], "second": GREEDY[2]}

    def add(name: str) -> None:
        speculative = SpeculativeConfig(trees[name])
        engine.add_request(name, asked[name].prompt, asked[name].params, speculative=speculative)

    add("first")
    engine.step()
    add("second")
    steps, tokens = [], {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            steps.append(output.request_id)
            tokens[output.request_id] = output.outputs[0].token_ids
    for name, request in asked.items():
        (alone,) = one_by_one(modules, [request], trees[name], "topk")
        assert tokens[name] == alone.tokens
    last_of_first = max(i for i, name in enumerate(steps) if name == "first")
    assert (steps.index("second") < last_of_first) == (other == "dynamic")


class FailsLater(OpRecorder):
    """Captures `good` rounds; of the next one only the first operations, as where memory runs out."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def record(self, function: Callable[[], None]) -> tuple[OpGraph, int]:
        if len(self.graphs) < self.good:
            return super().record(function)

        def begun() -> None:
            function()
            raise RuntimeError("CUDA error: out of memory")

        return super().record(begun)


@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_capture_that_fails_changes_no_token(good: int, ahead: bool, modules: Modules) -> None:
    """Rounds go on uncaptured, in the middle of answers, and the user is told once."""
    said: list[str] = []
    engine = eager_engine(modules, batch=2)
    engine.cuda_graphs = CudaGraphRunner("cpu", recorder=FailsLater(good), log=said.append)
    engine.async_scheduling = ahead
    for number, name in enumerate(["dynamic", "chain", "dynamic"]):
        wanted = one_by_one(modules, MIXED, SHAPES[name], "topk")
        assert answers_of(engine, MIXED, SHAPES[name]) == wanted
        assert engine.cuda_graphs.enabled == (number < good)
        assert len(said) == (0 if engine.cuda_graphs.enabled else 1)
    assert (engine.cuda_graphs.replays > 0) == (good > 0)
    assert "out of memory" in said[0]
