"""Token ids to text as they come: incremental decoding, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle_run.errors import UsageError

if TYPE_CHECKING:
    from eagle_run.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns a growing sequence of ids into text, piece by piece; the pieces join to the decoded whole.

    A piece ends at a character border: bytes of an unfinished UTF-8 character are held back. Each push
    decodes only the tokens since the last border (and the piece before it, for context): O(1) a token.
    Where a decoder with byte fallback meets bytes that are no character, it makes U+FFFD of all bytes around
    them, complete characters included. Those were shown by then, so they stay, and only the bytes from the
    first wrong one on become U+FFFD, one each.
    """

    _LONGEST = 32  # undecodable tokens kept; past this they are garbage, not an unfinished character
    _KEPT = 16  # more than enough to resynchronise UTF-8 (3 bytes) and to cover the characters held back

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._context: list[int] = []  # the tokens of the last finished piece
        self._pending: list[int] = []
        self._shown = ""  # how the text of context + pending begins, as far as it is out

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; may be empty."""
        # Special tokens are dropped here, since decoders treat the first token of a sequence differently.
        return "".join(self._push(token) for token in ids if token not in self._skip)

    def flush(self) -> str:
        """The rest, at the end: an unfinished character becomes U+FFFD."""
        text = self._decode(self._context + self._pending)
        rest = text[self._shown_length(text) :]
        self._context, self._pending, self._shown = [], [], ""
        return rest

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        held = len(text) - len(text.rstrip(_REPLACEMENT))  # maybe an unfinished character
        overdue = len(self._pending) > self._LONGEST
        if overdue:
            held = min(held, 3)  # one takes up 1 (byte-level) to 3 (byte fallback) of them, always the last
        piece = text[self._shown_length(text) : len(text) - held]
        if piece:
            self._shown = text[: len(text) - held]
        if held == 0 and piece:  # a token without text is no context
            self._restart(self._pending, held=0)
        elif overdue:
            self._restart(self._pending[-self._KEPT :], held=held)
        return piece

    def _shown_length(self, text: str) -> int:
        """How many characters of `text`, that of context + pending, are out."""
        if text.startswith(self._shown):
            return len(self._shown)
        same = _common_length(text, self._shown)
        # Byte fallback may now make U+FFFD of every byte of characters that were complete.
        spoilt = len(self._shown[same:].encode())
        if text[same : same + spoilt] == _REPLACEMENT * spoilt:
            return same + spoilt
        return len(self._shown)

    def _restart(self, context: list[int], *, held: int) -> None:
        """Forget all tokens before `context`, whose last `held` characters are not out yet."""
        self._context, self._pending = context, []
        text = self._decode(context)
        self._shown = text[: len(text) - held]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopStrings:
    """Lets text through up to the first complete stop string, even one that arrives in pieces.

    Text that may be the beginning of a stop string is held back until the next push decides. The stop string
    that is complete first wins, so where the text is cut does not depend on how it arrives; of several that
    are complete at the same character the longest does, which began first. `reached` is the winner, None
    before there is one. The text ends before it, or behind it with `include_stop_str_in_output`.
    Raises UsageError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty", hint="give at least one character")
        self.stops = tuple(stops)
        self.reached: str | None = None
        self._include = include_stop_str_in_output
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.reached is not None

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, whether a stop string was reached). After a stop nothing comes any more."""
        if self.stopped:
            return "", True
        text = self._held + text
        complete = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if complete:
            end, start = min(complete)
            self.reached, self._held = text[start:end], ""
            return text[: end if self._include else start], True
        size = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size], False

    def flush(self) -> str:
        """What is still held back, when generation ends for another reason."""
        rest, self._held = self._held, ""
        return rest


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
