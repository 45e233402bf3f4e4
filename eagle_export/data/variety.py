"""What keeps prompts varied and clean: near-duplicates are found, and those that a benchmark holds.

Two prompts are duplicates when their texts are the same but for case, width of characters, white space and
punctuation at the end; near-duplicates when the sets of their word triples overlap (Jaccard) by `near` or
more, estimated with MinHash (Broder, On the resemblance and containment of documents, 1997) over 64 hash
functions; candidates are found by bands of 4, so that a pair at 0.7 is missed once in a hundred.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

# Chinese, Japanese and Thai do not part their words: there each character is one.
_UNPARTED = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"
_WORD = rf"[{_UNPARTED}]|[^\W{_UNPARTED}]+"
_HASHES, _ROWS, _SHINGLE = 64, 4, 3
_RNG = np.random.default_rng(20250807)  # any constant: signatures must agree from one run to the next
_FACTOR = _RNG.integers(1, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SHIFT = _RNG.integers(0, 2**63, _HASHES, dtype=np.uint64)


def normalised(text: str) -> str:
    """Case, character width, white space and the punctuation at the end are no difference."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(plain.split()).rstrip(" .!?:;,")


def _words(text: str, *, punctuation: bool) -> list[str]:
    return re.findall(rf"{_WORD}|[^\w\s]" if punctuation else _WORD, normalised(text))


def _hash(parts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest(), "little")


def signature(text: str) -> np.ndarray:
    """MinHash of a text's word triples (of all its words where they are fewer): u64 [64]."""
    words = _words(text, punctuation=True)
    count = max(1, len(words) - _SHINGLE + 1)
    hashes = {_hash(words[start : start + _SHINGLE]) for start in range(count)}
    column = np.fromiter(hashes, np.uint64, len(hashes))[:, None]
    return ((column * _FACTOR + _SHIFT) >> np.uint64(16)).min(0)  # multiply and shift, in wrapping 64 bits


class Seen:
    """The prompts so far. `near` is the overlap from which a prompt counts as seen; 1: only equal ones."""

    def __init__(self, near: float) -> None:
        self.near = near
        self._exact: set[int] = set()
        self._signatures: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}

    def add(self, text: str) -> str | None:
        """Takes `text` in and gives None, or says why not: "duplicate" or "near-duplicate"."""
        exact = _hash([normalised(text)])
        if exact in self._exact:
            return "duplicate"
        if self.near < 1:
            own = signature(text)
            bands = [(at, own[at : at + _ROWS].tobytes()) for at in range(0, _HASHES, _ROWS)]
            candidates = {other for band in bands for other in self._bands.get(band, ())}
            if any(np.mean(self._signatures[other] == own) >= self.near for other in candidates):
                return "near-duplicate"
            for band in bands:
                self._bands.setdefault(band, []).append(len(self._signatures))
            self._signatures.append(own)
        self._exact.add(exact)
        return None


class Excluded:
    """Texts that must not be trained on, known by their runs of `length` words.

    A text hits when it shares a run of `length` words with one of them, or holds the whole of a shorter one
    of at least 4 words; shorter ones only hit texts that say the same.
    """

    def __init__(self, texts: Iterable[str], length: int) -> None:
        self.length = length
        self._runs: dict[int, set[int]] = {}  # by number of words
        self._whole: set[int] = set()
        for text in texts:
            words = _words(text, punctuation=False)
            self._whole.add(_hash(words))
            if len(words) >= 4:
                size = min(length, len(words))
                self._runs.setdefault(size, set()).update(_runs(words, size))

    def hits(self, text: str) -> bool:
        words = _words(text, punctuation=False)
        if _hash(words) in self._whole:
            return True
        return any(not known.isdisjoint(_runs(words, size)) for size, known in self._runs.items())


def _runs(words: Sequence[str], size: int) -> Iterable[int]:
    return (_hash(words[start : start + size]) for start in range(len(words) - size + 1))
