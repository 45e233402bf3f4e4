"""Answers that are no use: empty ones, and those that go round in circles."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_PERIOD = 96
_REPEATS, _LEAST = 4, 24  # a run counts as a loop with so many repeats, of so many tokens in all


def is_empty(text: str) -> bool:
    """Nothing but white space or characters that could not be decoded."""
    return not text.replace("\ufffd", "").strip()


def loop_start(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Where the first loop begins, and its period; None without one.

    A loop is a block of up to 96 tokens that comes at least four times in a row and fills 24 tokens or more.
    """
    found: tuple[int, int] | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) // _REPEATS) + 1):
        needed = max(_REPEATS * period, _LEAST) - period  # equal pairs in a row
        run = 0
        for at in range(period, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - period] else 0
            if run == needed:
                start = at - period - run + 1
                if found is None or start < found[0]:
                    found = start, period
                break
    return found


def without_loop(tokens: Sequence[int]) -> list[int]:
    """`tokens` up to the second repeat of its first loop; all of them where there is none."""
    loop = loop_start(tokens)
    return list(tokens) if loop is None else list(tokens[: loop[0] + 2 * loop[1]])
