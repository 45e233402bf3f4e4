"""Who is decoded when: first come first served, joins and leaves between rounds, full caches; and what each
forward is asked to do, counted by a graph that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from eagle_run.backends.base import Graph, Run
from eagle_run.decoding.config import PLAIN, SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.scheduler import Scheduler
from eagle_run.engine.sequence import Request, Sequence
from eagle_run.params import SamplingParams

CHAIN = SpeculativeConfig(TreeShape.chain(2))


def sequence(name: str, speculative: SpeculativeConfig = PLAIN) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=4)
    request = Request(name, (1, 2, 3), params, speculative)
    return Sequence(request, 0, params, max_seq_len=32, tokenizer=None)


def names(scheduler: Scheduler) -> list[str | None]:
    return [each.request.request_id if each else None for each in scheduler.slots]


def test_free_slots_take_who_waited_longest() -> None:
    scheduler = Scheduler(2)
    sequences = [sequence(name) for name in "abcd"]
    for each in sequences:
        scheduler.add(each)
    assert [(slot, each.request.request_id) for slot, each in scheduler.schedule()] == [(0, "a"), (1, "b")]
    assert list(scheduler.schedule()) == []
    assert not scheduler.can_schedule
    assert scheduler.remove(sequences[1]) == 1
    assert scheduler.can_schedule
    assert [(slot, each.request.request_id) for slot, each in scheduler.schedule()] == [(1, "c")]
    assert names(scheduler) == ["a", "c"]
    assert scheduler.remove(sequences[3]) is None  # it was waiting
    assert not scheduler.waiting
    assert scheduler.unfinished
    for each in (sequences[0], sequences[2]):
        scheduler.remove(each)
    assert not scheduler.unfinished


def test_another_tree_waits_until_the_slots_are_empty_and_is_not_overtaken() -> None:
    scheduler = Scheduler(2)
    first, other, third = sequence("a"), sequence("b", CHAIN), sequence("c")
    for each in (first, other, third):
        scheduler.add(each)
    assert [each.request.request_id for _, each in scheduler.schedule()] == ["a"]
    assert scheduler.speculative == PLAIN
    assert not scheduler.can_schedule  # "c" would fit, but "b" was there before
    scheduler.remove(first)
    assert [each.request.request_id for _, each in scheduler.schedule()] == ["b"]
    assert scheduler.speculative == CHAIN


class CountingGraph:
    """Counts the runs of a graph by its sizes."""

    capturable = False

    def __init__(self, graph: Graph) -> None:
        self.spec = graph.spec
        self.runs: Counter[tuple[int, int]] = Counter()  # (sequences, rows)
        self._graph = graph

    def bind(self, tensors: Mapping[str, Tensor], *, shared: bool = False) -> Run:
        run = self._graph.bind(tensors, shared=shared)
        sizes = tuple(tensors["input_ids"].shape)

        def counted() -> None:
            self.runs[sizes[0], sizes[1]] += 1
            run()

        return counted


@pytest.fixture
def counted(tiny_bundle: Path) -> tuple[Engine, CountingGraph]:
    """An engine of two slots that decodes plainly, and its target."""
    loaded = load_engine(tiny_bundle, threads=1, with_draft=False)
    target = CountingGraph(loaded.runner.graphs["target"])
    runner = ModelRunner({"target": target}, batch=2)
    return Engine(runner, loaded.limits, tokenizer=loaded.tokenizer), target


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)


def test_a_request_that_joins_costs_its_prompt_and_no_round_more(
    counted: tuple[Engine, CountingGraph],
) -> None:
    engine, target = counted
    engine.add_request("long", [5] * 9, params(10))
    for _ in range(4):
        engine.step()
    assert target.runs == {(1, 8): 1, (2, 1): 4}
    engine.add_request("short", [6] * 9, params(6))
    outputs = [engine.step() for _ in range(6)]
    assert [len(each) for each in outputs] == [2] * 6
    assert {output.request_id for output in outputs[-1] if output.finished} == {"long", "short"}
    assert target.runs == {(1, 8): 2, (2, 1): 10}
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert target.runs[2, 1] == 10  # nothing to do is nothing done


def test_an_aborted_request_leaves_its_slot_to_the_next(counted: tuple[Engine, CountingGraph]) -> None:
    engine, target = counted
    for name in ("a", "b", "c"):
        engine.add_request(name, [5, 6], params(100))
    engine.step()
    output = engine.abort_request("a")
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert len(output.outputs[0].token_ids) == 1
    assert {each.request_id for each in engine.step()} == {"b", "c"}
    waiting = engine.abort_request("c")
    assert waiting is not None
    assert engine.abort_request("c") is None
    engine.abort_request("b")
    assert engine.is_idle
    before = target.runs.copy()
    assert engine.step() == []
    assert target.runs == before


def test_nobody_waits_longer_than_those_before_take(counted: tuple[Engine, CountingGraph]) -> None:
    """Six requests in two slots: the order in which they are finished is that in which they came."""
    engine, _ = counted
    for number in range(6):
        engine.add_request(str(number), [5 + number], params(5))
    finished = []
    steps = 0
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
        steps += 1
    assert finished == list("012345")
    assert steps == 15


def test_a_full_cache_ends_an_answer_and_not_its_neighbour(counted: tuple[Engine, CountingGraph]) -> None:
    engine, _ = counted
    most = engine.limits.max_seq_len
    engine.add_request("full", [5] * (most - 3), params(100))
    engine.add_request("other", [5], params(20))
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = output.outputs[0]
    assert (len(done["full"].token_ids), done["full"].finish_reason) == (3, "length")
    assert (len(done["other"].token_ids), done["other"].finish_reason) == (20, "length")
