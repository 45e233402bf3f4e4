"""Answers that are no use: empty ones, and those that go round in circles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_LONGEST_PERIOD = 96
_REPEATS, _LEAST = 4, 24  # a run counts as a loop with so many repeats, of so many tokens in all
_PERIODS = np.arange(1, _LONGEST_PERIOD + 1)
_NEEDED = np.maximum(_REPEATS * _PERIODS, _LEAST) - _PERIODS  # equal pairs in a row, by period


def is_empty(text: str) -> bool:
    """Nothing but white space or characters that could not be decoded."""
    return not text.replace("\ufffd", "").strip()


class LoopWatch:
    """Is shown an answer token by token, and finds its first loop.

    A loop is a block of up to 96 tokens that comes at least four times in a row and fills 24 tokens or more.
    The first one is that with the earliest beginning, not the one that is complete first: a line of dashes
    may be part of a paragraph that repeats. `loop` is (where it begins, its period), None without one.
    """

    def __init__(self) -> None:
        self.loop: tuple[int, int] | None = None
        self._count = 0
        self._before = np.full(_LONGEST_PERIOD, -1)  # [i]: the token i + 1 places back
        self._runs = np.zeros_like(_PERIODS)  # by period: tokens in a row that equal those a period back

    def settles(self, token: int) -> bool:
        """Takes the next token. True: the first loop is known, whatever comes after."""
        self._runs = (self._runs + 1) * (self._before == token)
        self._before[1:] = self._before[:-1]
        self._before[0] = token
        self._count += 1
        # Where that began which repeats now, or would, if the next token repeats one.
        begins = np.maximum(self._count - _PERIODS - self._runs, 0)
        for place in np.flatnonzero(self._runs == _NEEDED):
            complete = int(begins[place]), int(_PERIODS[place])
            self.loop = min(self.loop or complete, complete)
        return self.loop is not None and int(begins.min()) >= self.loop[0]


def loop_criterion() -> Callable[[int], bool]:
    """A stopping criterion: it ends an answer once `without_loop` gives the same whatever follows."""
    return LoopWatch().settles


def loop_start(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Where the first loop begins, and its period; None without one. See `LoopWatch`."""
    watch = LoopWatch()
    any(map(watch.settles, tokens))  # up to the first that settles it
    return watch.loop


def without_loop(tokens: Sequence[int]) -> list[int]:
    """`tokens` up to the second repeat of its first loop; all of them where there is none."""
    loop = loop_start(tokens)
    return list(tokens) if loop is None else list(tokens[: loop[0] + 2 * loop[1]])
