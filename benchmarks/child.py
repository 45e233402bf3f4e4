"""Runs a step in a process of its own, so that its peak of memory is its own, up to a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_export.progress import peak_memory_bytes


@dataclass(frozen=True)
class Ended:
    """How a process ended. Peak memory is of it or of one that it waited for, whichever had more; where it is
    less than what this process has held, it is the process's own as looked up ten times a second.

    cpu_seconds: of all its threads, and of what it waited for. stopped: it was ended for its memory.
    """

    code: int
    out: str
    errors: str
    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    stopped: bool


def run(
    module: str,
    *arguments: str | Path,
    memory_limit: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """`python -m module arguments...`, which is ended when more than `memory_limit` bytes are resident.

    environment: variables beside those of this process.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=out, stderr=errors, env={**os.environ, **(environment or {})}
        ) as process:
            guard = _Guard(process, memory_limit)
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:
                process.kill()
                raise
            finally:
                guard.end()
            process.returncode = os.waitstatus_to_exitcode(status)  # else Popen would wait for it again
        seconds = time.perf_counter() - start
        counted = usage.ru_maxrss * 1024  # Linux counts in KiB, and from before the program was loaded
        inherited = 1.05 * peak_memory_bytes()  # which the kernel counts a little differently in each place
        out.seek(0)
        errors.seek(0)
        return Ended(
            code=process.returncode,
            out=out.read(),
            errors=errors.read(),
            seconds=seconds,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_memory_bytes=counted if counted > inherited else guard.peak,
            stopped=guard.stopped,
        )


class _Guard:
    """Looks at a process's memory ten times a second, and ends it where there is a limit."""

    def __init__(self, process: subprocess.Popen[bytes], limit: int | None) -> None:
        self.stopped = False
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(process, limit), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self, process: subprocess.Popen[bytes], limit: int | None) -> None:
        import psutil

        while not self._over.wait(0.1):
            try:
                resident = psutil.Process(process.pid).memory_info().rss
            except psutil.Error:  # it has just ended
                return
            self.peak = max(self.peak, resident)
            if limit is not None and resident > limit:
                self.stopped = True
                process.kill()
                return
