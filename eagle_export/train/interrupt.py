"""Ctrl-C between two updates: a checkpoint of half an update would not resume to the same weights."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """While this lasts the first signal to end is only noted; gives a function that says if one came.

    The second one interrupts at once. Outside the main thread, where signals never arrive, nothing changes.
    """
    came = False

    def note(*_: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    known = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        known = []
    handlers = {number: signal.signal(number, note) for number in known}
    try:
        yield lambda: came
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
