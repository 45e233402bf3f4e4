"""Progress on stderr: one line a step with its seconds, a spinner or a bar on a terminal; and peak memory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


class Progress:
    """Tells the user on stderr what happens, and remembers how long each step took.

    `quiet` prints nothing. Off a terminal there are only plain lines, so that a log stays readable.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._started = time.perf_counter()
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.seconds: dict[str, float] = {}
        _silence_transformers()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times what happens inside and prints one line when it is done. A step that fails prints none."""
        start = time.perf_counter()
        with self.console.status(name):
            yield
        self.seconds[name] = time.perf_counter() - start
        self.console.print(f"  {name:<44}{self.seconds[name]:>7.1f} s", markup=False)

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """The items one by one, with a bar that counts them."""
        from rich.progress import track

        start = time.perf_counter()
        still = not self.console.is_terminal
        bar = track(items, description=f"  {name}", console=self.console, transient=True, disable=still)
        yield from bar
        self.seconds[name] = time.perf_counter() - start
        self.console.print(f"  {name:<44}{self.seconds[name]:>7.1f} s", markup=False)

    @contextmanager
    def bar(self, name: str) -> Iterator[Callable[[float, str], None]]:
        """A step that knows how far it is: gives a function of the share done and of what is being done."""
        from rich import progress as rich_progress

        start = time.perf_counter()
        columns = (
            rich_progress.TextColumn("  {task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("{task.fields[part]}"),
        )
        still = not self.console.is_terminal
        with rich_progress.Progress(*columns, console=self.console, transient=True, disable=still) as bar:
            task = bar.add_task(name, total=1.0, part="")
            yield lambda share, part: bar.update(task, completed=share, part=part)
        self.seconds[name] = time.perf_counter() - start
        self.console.print(f"  {name:<44}{self.seconds[name]:>7.1f} s", markup=False)

    def note(self, text: str) -> None:
        """A line for the user that is neither result nor error; one line, since logs are read by lines."""
        self.console.print(f"  {text}", markup=False, soft_wrap=True)

    def total_seconds(self) -> float:
        """Wall time since this object was made."""
        return time.perf_counter() - self._started


def _silence_transformers() -> None:
    """Its own bars, and those of huggingface_hub, would tear ours apart. Loads neither."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # both ask for it when they are loaded
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()


def peak_memory_bytes() -> int:
    """The most resident memory this process has had so far.

    Not by getrusage on Linux: there a child starts with its parent's peak.
    """
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
