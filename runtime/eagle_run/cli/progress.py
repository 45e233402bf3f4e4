"""Progress of long work, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def questions_bar(total: int) -> Iterator[Callable[[int, float], None]]:
    """A bar over `total` pairs of runs; the function it gives takes (pairs done, speed-up so far)."""
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speedup]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, speedup="")

        def update(done: int, speedup: float) -> None:
            progress.update(task, completed=done, speedup=f"{speedup:.2f}x plain")

        yield update
