"""Runs a step in a process of its own, so that its peak of memory is its own, up to a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# Linux counts a process's peak from before its program is loaded, when its memory is still its parent's. So a
# small process is between: it starts the command, says its number, waits, and says what the kernel counted.
_STARTER = """
import json, os, sys
report = os.fdopen(int(sys.argv[1]), "w", buffering=1)
os.set_inheritable(report.fileno(), False)
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
print(pid, file=report)
_, status, usage = os.wait4(pid, 0)
counted = {"code": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss * 1024}
print(json.dumps({**counted, "cpu": usage.ru_utime + usage.ru_stime}), file=report)
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended. Peak memory is of it or of one that it waited for, whichever had more.

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
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
    ):
        reports, write_end = os.pipe()
        with (
            os.fdopen(reports) as report,
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _STARTER, str(write_end), *command],
                stdout=out,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                pass_fds=[write_end],
            ),
        ):
            os.close(write_end)
            counted, seconds, stopped = _watch(report, memory_limit)
        out.seek(0)
        errors.seek(0)
        return Ended(
            code=counted["code"],
            out=out.read(),
            errors=errors.read(),
            seconds=seconds,
            cpu_seconds=counted["cpu"],
            peak_memory_bytes=counted["peak"],
            stopped=stopped,
        )


def _watch(report: IO[str], memory_limit: int | None) -> tuple[dict[str, Any], float, bool]:
    """Waits for the command: what was counted, its seconds, and whether it was ended for its memory."""
    import psutil

    process = psutil.Process(int(report.readline()))
    start = time.perf_counter()
    guard = _Guard(process, memory_limit)
    try:
        counted = json.loads(report.readline())
    except BaseException:
        process.kill()
        raise
    finally:
        guard.end()
    return counted, time.perf_counter() - start, guard.stopped


class _Guard:
    """Looks at a process's memory ten times a second, and ends it where it passes a limit."""

    def __init__(self, process: Any, limit: int | None) -> None:
        self.stopped = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(process, limit), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self, process: Any, limit: int | None) -> None:
        import psutil

        while limit is not None and not self._over.wait(0.1):
            try:
                resident = process.memory_info().rss
            except psutil.Error:  # it has just ended
                return
            if resident > limit:
                self.stopped = True
                process.kill()
                return
