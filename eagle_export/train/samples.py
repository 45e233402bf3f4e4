"""Training conversations as token ids: shards of safetensors that `eagle-export data` writes, or one .npz.

A shard holds whole conversations: tokens int32 [sum], offsets int64 [n+1], prompt_lengths int32 [n], and
optionally loss_mask uint8 [sum] where a conversation has several answers. Which target wrote them is said in
data.json, and in an .npz as the text `target_sha256`, if at all. What else is in it does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_export.train.settings import MAKE_DATA, check_sources
from eagle_run.errors import EagleError, UsageError, first_line
from eagle_run.json_files import read_json

_PART = 256  # conversations of an .npz that make one shard
_ARRAYS = ("tokens", "offsets", "prompt_lengths", "loss_mask")
_TARGET = "target_sha256"  # in an .npz: a text


@dataclass(frozen=True, eq=False)
class Shard:
    """Some conversations. answers: bool [sum], true for tokens that the target wrote.

    signed: the data says which target that was, and it was compared with the one at hand.
    """

    name: str
    tokens: Tensor
    offsets: Tensor
    answers: Tensor
    signed: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sha256(self) -> str:
        """Of the tokens and where conversations end."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        digest.update(self.offsets.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Samples:
    """Conversations from several shards, numbered through."""

    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", np.cumsum([0, *map(len, self.shards)]))

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def where(self, index: int) -> tuple[int, int]:
        """Number of the shard and of the conversation in it."""
        starts: Any = self._starts  # type: ignore[attr-defined]
        shard = int(np.searchsorted(starts, index, side="right")) - 1
        return shard, index - int(starts[shard])

    def conversation(self, index: int) -> tuple[Tensor, Tensor]:
        """tokens int32 [t] and answers bool [t] of one conversation."""
        number, at = self.where(index)
        shard = self.shards[number]
        first, last = int(shard.offsets[at]), int(shard.offsets[at + 1])
        return shard.tokens[first:last], shard.answers[first:last]

    def lengths(self) -> Tensor:
        """int64 [n]: tokens of each conversation."""
        return torch.cat([shard.offsets.diff() for shard in self.shards])

    def answered(self, length: int) -> int:
        """Tokens of answers that a draft learns to predict: from a conversation's third to its `length`th."""
        answered_rows = 0
        for shard in self.shards:
            position = _positions(shard.offsets)
            answered_rows += int((shard.answers & (position >= 2) & (position < length)).sum())
        return answered_rows

    @property
    def token_count(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


def load_samples(sources: Sequence[Path], *, vocab_size: int, target_sha256: str | None = None) -> Samples:
    """Reads data folders and .npz files, in the order given.

    Raises UsageError where there is none, EagleError for data that is damaged, of another target
    (`target_sha256`, where a folder's data.json or an .npz names one) or outside of the vocabulary.
    """
    check_sources(sources)
    shards: list[Shard] = []
    for source in map(Path, sources):
        if source.is_dir():
            signed = _signed(source, _folder_target(source), target_sha256)
            paths = sorted(source.glob("[0-9]*.safetensors"))
            if not paths:
                raise UsageError(f"{source}: no shards (00000.safetensors and so on)", hint=MAKE_DATA)
            read = [_shard(path.name, _read(path), vocab_size, path) for path in paths]
            shards += [replace(shard, signed=signed) for shard in read]
        else:
            shards += list(_parts(source, vocab_size, target_sha256))
    kept = tuple(shard for shard in shards if len(shard))  # of some all conversations were dropped
    if not kept:
        raise UsageError(f"{', '.join(map(str, sources))}: no conversations", hint=MAKE_DATA)
    return Samples(kept)


def _folder_target(folder: Path) -> str | None:
    """The target that a folder's data.json names."""
    where = folder / "data.json"
    if not where.is_file():
        raise EagleError(f"{folder}: no data.json", hint=MAKE_DATA)
    facts = read_json(where, hint=MAKE_DATA)
    target = facts.get("target") if isinstance(facts, dict) else None
    return target.get("sha256") if isinstance(target, dict) else None


def _signed(source: Path, signature: str | None, expected: str | None) -> bool:
    if expected is not None and signature is not None and signature != expected:
        raise EagleError(
            f"{source} was written by another target: expected sha256 {expected[:12]}…, found "
            f"{signature[:12]}…",
            hint="a head learns what its own target says; make data with this target",
        )
    return signature is not None


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # whatever the parser runs into
        raise EagleError(f"{path}: not a whole safetensors file: {error}", hint=MAKE_DATA) from None


def _parts(path: Path, vocab_size: int, target_sha256: str | None) -> Iterator[Shard]:
    try:
        with np.load(path) as file:
            arrays = {name: torch.from_numpy(_widen(file[name])) for name in _ARRAYS if name in file}
            target = str(file[_TARGET]) if _TARGET in file else None
    except Exception as error:  # whatever NumPy and zipfile run into
        raise EagleError(f"{path}: not readable: {first_line(error)}", hint=MAKE_DATA) from None
    signed = _signed(path, target, target_sha256)
    whole = _shard(path.name, arrays, vocab_size, path)
    for first in range(0, len(whole), _PART):
        last = min(first + _PART, len(whole))
        low, high = int(whole.offsets[first]), int(whole.offsets[last])
        yield Shard(
            f"{path.name}[{first}:{last}]",
            whole.tokens[low:high],
            whole.offsets[first : last + 1] - low,
            whole.answers[low:high],
            signed,
        )


def _widen(array: np.ndarray) -> np.ndarray:
    """torch does little with unsigned 16 bit."""
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)


def _shard(name: str, arrays: dict[str, Tensor], vocab_size: int, path: Path) -> Shard:
    missing = {"tokens", "offsets", "prompt_lengths"} - set(arrays)
    if missing:
        raise EagleError(f"{path}: no {', '.join(sorted(missing))}", hint=MAKE_DATA)
    for key in ("tokens", "offsets", "prompt_lengths"):
        if arrays[key].dim() != 1 or arrays[key].is_floating_point():
            raise EagleError(f"{path}: {key} should be a row of whole numbers", hint=MAKE_DATA)
    tokens, offsets = arrays["tokens"].int(), arrays["offsets"].long()
    prompts = arrays["prompt_lengths"].long()
    count = len(offsets) - 1
    lengths = offsets.diff()
    whole = (
        count >= 0 and int(offsets[0]) == 0 and int(offsets[-1]) == len(tokens) and bool((lengths > 0).all())
    )
    if not whole or len(prompts) != count or bool((prompts > lengths).any() | (prompts < 0).any()):
        raise EagleError(
            f"{path}: offsets or prompt_lengths do not fit its {len(tokens)} tokens", hint=MAKE_DATA
        )
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise EagleError(
            f"{path}: token ids from {int(tokens.min())} to {int(tokens.max())}, but this target has "
            f"{vocab_size} tokens",
            hint="make data with this target",
        )
    if "loss_mask" in arrays:
        answers = arrays["loss_mask"].bool()
        if answers.shape != tokens.shape:
            raise EagleError(
                f"{path}: loss_mask has {len(answers)} entries for {len(tokens)} tokens", hint=MAKE_DATA
            )
    else:
        answers = _positions(offsets) >= prompts.repeat_interleave(lengths)
    return Shard(name, tokens, offsets, answers)


def _positions(offsets: Tensor) -> Tensor:
    """int64 [sum]: each token's position in its conversation."""
    return torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(offsets.diff())
