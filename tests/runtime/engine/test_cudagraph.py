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


def test_what_cannot_be_captured_is_called_from_then_on() -> None:
    """The work that the capture had noted is done once, and the log is told once."""
    total, said = torch.zeros(3), []
    recorder = OpRecorder()

    def read() -> None:
        total.add_(1)
        total.sum().item()

    rounds = CudaGraphRunner("cpu", recorder=recorder, log=said.append)
    for _ in range(3):
        rounds.run("fine", adding(total, 10))
    for count in range(1, 5):
        rounds.run("read", read)
        assert total.tolist() == [30.0 + count] * 3
    rounds.run("fine", adding(total, 10))
    assert total.tolist() == [44.0] * 3
    assert (rounds.calls, rounds.replays) == (6, 2)
    assert not rounds.enabled
    assert rounds.captured == ()
    assert not recorder.graphs[0].alive  # its memory is free again
    assert len(said) == 1
    assert "without CUDA graphs" in said[0]
    assert "a value to the host" in said[0]


class FailingReplay:
    """A recording that fails in the middle."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total

    def replay(self) -> None:
        self.total.add_(0.5)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nfor debugging ...")

    def reset(self) -> None:
        raise RuntimeError("CUDA error: the same again")


class Failing:
    """A recorder of recordings that fail, or of a device that has failed."""

    def __init__(self, total: torch.Tensor, *, early: bool) -> None:
        self.total, self.early = total, early

    def record(self, _: Callable[[], object]) -> tuple[FailingReplay, int]:
        if self.early:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return FailingReplay(self.total), 0


@pytest.mark.parametrize("early", [False, True], ids=["in a replay", "before a capture"])
def test_what_may_have_half_run_is_not_run_again(early: bool) -> None:
    """Neither a failed replay nor a round before a capture can be undone, so the run ends."""
    total, said = torch.zeros(()), []
    rounds = CudaGraphRunner("cpu", recorder=Failing(total, early=early), log=said.append)
    rounds.run("add", adding(total, 1))
    with pytest.raises(EagleError, match="may have half-run: CUDA error: an illegal memory access") as caught:
        rounds.run("add", adding(total, 1))
    assert total == (1.0 if early else 1.5)  # nothing was done a second time
    assert caught.value.parameters == ("cuda_graphs", "batch")
    assert said == []
    rounds.run("add", adding(total, 1))  # a new run may go on without graphs
    assert total == (2.0 if early else 2.5)
    assert not rounds.enabled
