"""Rounds that are captured, and rounds that run ahead, give the tokens of rounds that do neither.

`OpRecorder` stands for the CUDA graph: what it replays are the operations of a round on the memory of the
round, without its Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.opgraph import OpGraph, OpRecorder
from support.tiny import Answer, answers_of, eager_decoder, modules_of

from eagle_export.reference.modules import Modules
from eagle_run.decoding.sampling import SamplingParams
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.decoder import Decoder
from eagle_run.engine.request import Request, Stats
from eagle_run.errors import EagleError

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
            SamplingParams(),
            SamplingParams(1.0, seed=11),
            SamplingParams(0.8, top_p=0.9, seed=5),
            SamplingParams(0.9, top_k=7, seed=6),
            SamplingParams(1.3, min_p=0.02, seed=4),
        ],
        strict=True,
    )
]


@pytest.fixture(scope="module")
def modules(tiny_target: Path, tiny_head: Path) -> Modules:
    return modules_of(tiny_target, tiny_head)


def recorded(modules: Modules, **how: object) -> tuple[Decoder, CudaGraphRunner]:
    decoder = eager_decoder(modules, **how)  # type: ignore[arg-type]
    decoder.rounds = CudaGraphRunner("cpu", recorder=OpRecorder())
    return decoder, decoder.rounds


def one_by_one(modules: Modules, requests: list[Request], shape: TreeShape, rule: str) -> list[Answer]:
    decoder = eager_decoder(modules)
    return [answers_of(decoder, [request], shape, rule=rule)[0] for request in requests]


@pytest.mark.parametrize(("batch", "ahead"), [(1, False), (3, False), (1, True), (3, True)], ids=str)
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
    *, name: str, rule: str, requests: list[Request], batch: int, ahead: bool, modules: Modules
) -> None:
    shape = SHAPES[name]
    wanted = one_by_one(modules, requests, shape, rule)
    decoder, rounds = recorded(modules, batch=batch)
    decoder.run_ahead = ahead
    assert answers_of(decoder, requests, shape, rule=rule) == wanted
    assert rounds.replays > rounds.calls
    before = rounds.captured
    assert answers_of(decoder, requests, shape, rule=rule) == wanted  # and all of it again, replayed
    assert rounds.captured == before


def test_other_settings_need_no_other_capture(modules: Modules) -> None:
    """Temperature, top-p and seed are read from device memory by the rounds that were captured."""
    shape, base = SHAPES["dynamic"], SamplingParams(1.0, top_p=0.9, seed=1)
    decoder, rounds = recorded(modules)
    answers_of(decoder, [replace(GREEDY[0], sampling=base)], shape)
    captured, calls = rounds.captured, rounds.calls
    answers = []
    for sampling in (
        SamplingParams(0.6, top_p=0.9, seed=1),
        SamplingParams(1.0, top_p=0.5, seed=1),
        SamplingParams(1.0, top_p=0.9, seed=2),
        base,
    ):
        request = replace(GREEDY[0], sampling=sampling)
        (answer,) = answers_of(decoder, [request], shape)
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
            decoder = eager_decoder(modules)
            decoder.run_ahead = ahead
            (answer,) = answers_of(decoder, [request], shape, stats=(stats := Stats()))
            counts.append((answer, stats.rounds, stats.emitted, decoder.rounds.calls))
        (first, *same, calls), (second, *again, more) = counts
        assert first == second
        assert same == again  # the round that was too many is in no figure
        assert calls <= more <= calls + extra


@pytest.mark.parametrize("batch", [1, 2])
def test_running_ahead_stays_inside_the_caches(batch: int, modules: Modules) -> None:
    """The round too many of an answer that filled the context: its slot has retired itself by then."""
    shape = SHAPES["chain"]
    long, short = tuple(range(10, 40)), Request((12,), max_new_tokens=20)
    for room in range(1, 8):
        request = Request(long, max_new_tokens=60)
        most, behind = len(long) + room, max(16, shape.cache_rows)
        answers = []
        for ahead in (False, True):
            decoder = eager_decoder(modules, batch=batch, max_seq_len=most, extra_rows=behind)
            decoder.run_ahead = ahead
            answers.append(answers_of(decoder, [request, short], shape))
        assert answers[0] == answers[1]
        assert len(answers[0][0].tokens) == room
        decoder, _ = recorded(modules, batch=batch, max_seq_len=most, extra_rows=behind)
        for ahead in (False, False, True, True):  # rounds captured in step do not serve one that runs ahead
            decoder.run_ahead = ahead
            assert answers_of(decoder, [request, short], shape) == answers[0]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_a_finished_slot_takes_the_next_request_while_others_go_on(ahead: bool, modules: Modules) -> None:
    shape = SHAPES["dynamic"]
    decoder = eager_decoder(modules, batch=2)
    decoder.run_ahead = ahead
    long = Request((7, 20, 33, 5, 61), max_new_tokens=60)
    short = [Request((n, n + 1, n + 2), max_new_tokens=6) for n in range(10, 50, 5)]
    order: list[int] = []
    for piece in decoder.generate([long, *short], shape):
        if piece.index not in order:
            order.append(piece.index)
        if piece.index == 0 and piece.finish_reason:
            begun = len(order)
    assert order == sorted(order)
    assert begun > 4  # while the long one was decoded, one short one after the other had its turn
    stats = Stats()
    assert answers_of(decoder, [long, *short], shape, stats=stats) == one_by_one(
        modules, [long, *short], shape, "topk"
    )
    assert stats.tokens == 60 + 6 * len(short)


def test_an_answer_left_in_the_middle_does_not_show(modules: Modules) -> None:
    decoder, _ = recorded(modules, batch=2)
    decoder.run_ahead = True
    shape = SHAPES["dynamic"]
    run = decoder.generate(GREEDY[:2], shape)
    for _ in range(4):
        next(run)
    run.close()
    assert answers_of(decoder, GREEDY[2:3], shape) == one_by_one(modules, GREEDY[2:3], shape, "topk")


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_of_one_token_does_not_see_the_one_before(seed: int, modules: Modules) -> None:
    """It has no pending pair; drawn drafts are those of a decoder that was never used."""
    request = Request((12 + seed,), SamplingParams(1.0, seed=seed), max_new_tokens=12)
    fresh, used = eager_decoder(modules), eager_decoder(modules)
    answers_of(used, GREEDY[:1], SHAPES["chain"], rule="sampled")
    wanted = answers_of(fresh, [request], SHAPES["chain"], rule="sampled")
    assert answers_of(used, [request], SHAPES["chain"], rule="sampled") == wanted


@pytest.mark.parametrize("other", ["dynamic", "plain"])
def test_a_second_run_ends_the_first_one_aloud(other: str, modules: Modules) -> None:
    decoder = eager_decoder(modules, batch=2)
    first = decoder.generate(GREEDY[:2], SHAPES["dynamic"])
    next(first)
    second = answers_of(decoder, GREEDY[2:3], SHAPES[other])
    assert second == one_by_one(modules, GREEDY[2:3], SHAPES[other], "topk")
    with pytest.raises(EagleError, match="another one has begun"):
        list(first)


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
    decoder = eager_decoder(modules, batch=2)
    decoder.rounds = CudaGraphRunner("cpu", recorder=FailsLater(good), log=said.append)
    decoder.run_ahead = ahead
    for number, name in enumerate(["dynamic", "chain", "dynamic"]):
        wanted = one_by_one(modules, MIXED, SHAPES[name], "topk")
        assert answers_of(decoder, MIXED, SHAPES[name]) == wanted
        assert decoder.rounds.enabled == (number < good)
        assert len(said) == (0 if decoder.rounds.enabled else 1)
    assert (decoder.rounds.replays > 0) == (good > 0)
    assert "out of memory" in said[0]
