"""Runs functions that repeat as CUDA graphs: one launch in place of hundreds, and no gaps between kernels.

A function given twice under one key must do the same work on the same memory. The first time it simply runs,
which is real work and at once the warm-up that a capture needs: buffers get made, kernels get loaded. The
second time it is captured, and from then on replayed. A capture executes nothing, so a replay follows it.

When something fails, what may be done next depends on what the GPU has done. Of a capture that fails it has
done nothing: kernels were noted, not run. So the function is called instead, from the start, and from then on
every round is. Of a replay that fails it may have done a part, such as moving some rows of a cache, which a
second time would be moved again: the run ends with an error. An error that the GPU reports before a capture
begins is of earlier rounds, which may have half-run as well: that run ends, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from eagle_run.backends.stream import on_stream, stream_of
from eagle_run.errors import EagleError, first_line

Function = Callable[[], object]  # what it returns is not used


class Recording(Protocol):
    """A captured function; `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None: ...
    def reset(self) -> None: ...


class NotCapturedError(Exception):
    """A function could not be captured. Nothing of it was executed, and the device is in order."""


class Recorder(Protocol):
    """Captures. `record` must not execute; it returns (what to replay, bytes of device memory it took).

    It raises NotCapturedError where only the capture failed, and RuntimeError where the device did.
    """

    def record(self, function: Function) -> tuple[Recording, int]: ...


class CudaRecorder:
    """Captures on the stream of `device`, all graphs in one memory pool: only one of them runs at a time.

    Memory of the pool is reused from graph to graph, so nothing that outlives a replay may be in it: what a
    function leaves for others it writes to tensors made outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Function) -> tuple[Recording, int]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)  # what fails here failed in earlier rounds
        torch.cuda.empty_cache()  # the capture does so too; here it keeps that out of the count
        free, _ = torch.cuda.mem_get_info(self._device)
        # thread_local: what other threads of the process do on the GPU does not break the capture.
        capture = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=stream_of(self._device),
            capture_error_mode="thread_local",
        )
        first: list[Exception] = []
        try:
            with capture, _noting(first):
                function()
        except Exception as error:
            torch.cuda.synchronize(self._device)  # raises where it is not the capture that failed
            why = first[0] if first else error  # the end of a broken capture raises, too
            raise NotCapturedError(first_line(why)) from why
        left, _ = torch.cuda.mem_get_info(self._device)
        return graph, max(free - left, 0)


@contextmanager
def _noting(errors: list[Exception]) -> Iterator[None]:
    """Adds to `errors` what is raised inside, on its way out."""
    try:
        yield
    except Exception as error:
        errors.append(error)
        raise


class CudaGraphRunner:
    """Functions by key: run the first time, captured the second, then replayed.

    Where it is not `enabled` (a CPU, a backend that cannot be captured) functions are called every time.
    At most `most` graphs are kept; the one that was not used for longest makes room. `replays` and `calls`
    count the two ways of running.

    A function that cannot be captured is called, as are all others from then on; `log` is told so, once.
    That is safe: a capture executes nothing. A replay that fails may have half-run, and raises EagleError.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        enabled: bool = True,
        most: int = 64,
        recorder: Recorder | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._recorder = recorder
        if recorder is None and enabled and self._device.type == "cuda":
            self._recorder = CudaRecorder(self._device)
        self._most = most
        self._log = log or (lambda _: None)
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[Hashable, tuple[Recording, int]] = OrderedDict()
        self.replays = 0
        self.calls = 0

    @property
    def enabled(self) -> bool:
        return self._recorder is not None

    @property
    def captured(self) -> tuple[Hashable, ...]:
        """Keys of the graphs that are there, the last used one last."""
        return tuple(self._graphs)

    @property
    def memory_bytes(self) -> int:
        """Device memory that the captures took. Graphs share it, so a first one takes more than others."""
        return sum(size for _, size in self._graphs.values())

    def run(self, key: Hashable, function: Function, *, capture: bool = True) -> None:
        """Does the work of `function`, by replaying it if `key` was seen before and it may be captured."""
        with on_stream(self._device):
            if capture and self._is_captured(key, function):
                self._replay(key)
            else:
                self._seen.add(key)
                self.calls += 1
                function()

    def clear(self) -> None:
        """Frees all graphs. The next run under a key is a first one again."""
        graphs, self._graphs = self._graphs, OrderedDict()
        self._seen.clear()
        for graph, _ in graphs.values():
            graph.reset()

    def _is_captured(self, key: Hashable, function: Function) -> bool:
        """Whether there is a graph under `key`: it is captured now if the key was seen before."""
        if self._recorder is None or key not in self._seen:
            return False
        if key in self._graphs:
            return True
        while len(self._graphs) >= self._most:
            _, (oldest, _) = self._graphs.popitem(last=False)
            oldest.reset()
        try:
            self._graphs[key] = self._recorder.record(function)
        except NotCapturedError as error:
            self._stop_capturing()
            self._log(f"note: rounds run without CUDA graphs, since one could not be captured: {error}")
            return False
        except RuntimeError as error:
            raise self._failed(error) from error
        return True

    def _replay(self, key: Hashable) -> None:
        self._graphs.move_to_end(key)
        self.replays += 1
        try:
            self._graphs[key][0].replay()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> EagleError:
        """The end of this run. Later ones, which begin with caches of their own making, capture nothing."""
        self._stop_capturing()
        return EagleError(
            f"a round failed on the GPU and may have half-run: {first_line(error)}",
            hint="run again without CUDA graphs, or with a smaller batch if memory is short",
            parameters=["cuda_graphs", "batch"],
        )

    def _stop_capturing(self) -> None:
        self._recorder = None
        with suppress(RuntimeError):  # of a GPU that has failed
            self.clear()
