"""Clocks for a GPU: events around every round, graphs replayed alone, what memory and cores do at best.

On a CPU, for a dry run, the same with the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from eagle_run.backends.stream import on_stream, stream_of, wait
from eagle_run.engine.cuda_graphs import CudaGraphRunner, Function


@dataclass(frozen=True)
class Timeline:
    """Of rounds one after another: ms inside each, and ms from the first one's begin to the last one's end.

    Both are read on the device's own clock. Inside a captured round there are no gaps that a host could fill,
    so `busy` is the share of the time in which the device had work.
    """

    inside: tuple[float, ...]
    whole: float

    @property
    def busy(self) -> float:
        return sum(self.inside) / self.whole if self.whole else 0.0

    @property
    def round(self) -> float:
        """Median ms of a round."""
        return median(self.inside)


def mark(device: torch.device) -> Any:
    """A point in time on the device's stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream_of(device))
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Between two marks that the device has passed."""
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


class MeasuredRounds(CudaGraphRunner):
    """Rounds with a mark before and behind each."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        super().__init__(device, enabled=enabled)
        self._marks: list[tuple[Any, Any]] = []

    def run(self, key: Hashable, function: Function, *, capture: bool = True) -> None:
        start = mark(self._device)
        super().run(key, function, capture=capture)
        self._marks.append((start, mark(self._device)))

    def take(self) -> Timeline:
        """The rounds since the last call; waits for them."""
        wait(self._device)
        marks, self._marks = self._marks, []
        if not marks:
            return Timeline((), 0.0)
        return Timeline(tuple(milliseconds(*pair) for pair in marks), milliseconds(marks[0][0], marks[-1][1]))


def alone(device: torch.device, functions: dict[str, Function], *, times: int = 20) -> dict[str, float]:
    """Median ms of each function, captured by itself and replayed.

    In turns, so that all see the same clocks, and none finds its weights in a cache that it filled itself.
    """
    rounds = CudaGraphRunner(device, enabled=device.type == "cuda")
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for turn in range(times + 3):  # once as it is, once captured, once replayed for nothing
        for name, function in functions.items():
            start = mark(device)
            rounds.run(name, function)
            if turn >= 3:
                marks[name].append((start, mark(device)))
    wait(device)
    rounds.clear()
    return {name: median(milliseconds(*pair) for pair in pairs) for name, pairs in marks.items()}


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second that a copy inside the device's memory reads and writes, both counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(source)
    wait_all(device)
    return 2 * size / (1e-3 * _best(device, lambda: other.copy_(source)))


def product_rate(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Multiply-adds per second, times two, of a large product of square matrices."""
    a, b = (torch.full((width, width), 0.01, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    wait_all(device)
    return 2 * width**3 / (1e-3 * _best(device, lambda: torch.mm(a, b, out=out)))


def wait_all(device: torch.device) -> None:
    """Blocks until all streams of the device are done; models and buffers are made on torch's default one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best(device: torch.device, function: Any) -> float:
    """Least ms of ten runs."""
    pairs = []
    with on_stream(device):
        for _ in range(12):
            start = mark(device)
            function()
            pairs.append((start, mark(device)))
    wait(device)
    return min(milliseconds(*pair) for pair in pairs[2:])
