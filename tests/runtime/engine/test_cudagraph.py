"""The bookkeeping of captures: what runs, what is captured, what is replayed, what makes room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.opgraph import OpRecorder

from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.errors import EagleError


def adding(total: torch.Tensor, value: float) -> Callable[[], None]:
    def add() -> None:
        total.add_(value)

    return add


def test_first_run_then_captured_then_replayed() -> None:
    recorder, total = OpRecorder(), torch.zeros(())
    rounds = CudaGraphRunner("cpu", recorder=recorder)
    called = []

    def add() -> None:
        called.append(len(called))
        total.add_(1)

    for count in range(1, 6):
        rounds.run("add", add)
        assert total == count  # a capture does nothing by itself, so that no run counts twice or not at all
    assert len(called) == 2  # once to warm up, once to capture
    assert (rounds.calls, rounds.replays) == (1, 4)
    assert rounds.captured == ("add",)
    assert recorder.graphs[0].replays == 4


def test_keys_have_their_own_graphs() -> None:
    total = torch.zeros(())
    rounds = CudaGraphRunner("cpu", recorder=OpRecorder())
    for _ in range(3):
        rounds.run("one", adding(total, 1))
        rounds.run("ten", adding(total, 10))
    assert total == 33
    assert rounds.captured == ("one", "ten")
    assert rounds.memory_bytes == 2000


def test_the_one_not_used_for_longest_makes_room() -> None:
    recorder, total = OpRecorder(), torch.zeros(())
    rounds = CudaGraphRunner("cpu", recorder=recorder, most=2)

    def run(key: str) -> None:
        rounds.run(key, adding(total, 1))

    for key in "aabbacc":
        run(key)
    assert rounds.captured == ("a", "c")
    assert [graph.alive for graph in recorder.graphs] == [True, False, True]
    run("b")  # captured again, and "a" goes
    assert rounds.captured == ("c", "b")
    assert total == 8


def test_without_a_gpu_functions_are_called() -> None:
    called = []
    for rounds in (CudaGraphRunner("cpu"), CudaGraphRunner("cuda", enabled=False)):
        if rounds.enabled:
            pytest.fail("nothing to capture with")
    rounds = CudaGraphRunner("cpu")
    for _ in range(3):
        rounds.run("key", lambda: called.append(1))
    assert len(called) == 3
    assert (rounds.calls, rounds.replays, rounds.captured, rounds.memory_bytes) == (3, 0, (), 0)


def test_clear_begins_anew() -> None:
    recorder, total = OpRecorder(), torch.zeros(())
    rounds = CudaGraphRunner("cpu", recorder=recorder)
    for _ in range(3):
        rounds.run("key", adding(total, 1))
    rounds.clear()
    assert rounds.captured == ()
    assert not recorder.graphs[0].alive
    for _ in range(2):
        rounds.run("key", adding(total, 1))
    assert total == 5
    assert len(recorder.graphs) == 2


def test_what_cannot_be_captured_is_an_error_that_says_so() -> None:
    total = torch.zeros(3)

    def read() -> None:
        total.sum().item()

    rounds = CudaGraphRunner("cpu", recorder=OpRecorder())
    rounds.run("read", read)
    with pytest.raises(EagleError, match="cannot be captured") as caught:
        rounds.run("read", read)
    assert "--no-cuda-graphs" in str(caught.value.hint)
    assert rounds.captured == ()
