"""What the target makes of the conversations: features, last hidden state, best token. Cached, or on the fly.

Logits are not kept: the last hidden state after the final norm has all that they hold in a hundredth of the
room. A cache is a folder with one file per shard, named by a hash of everything that decides its content, so
data that grows costs only what is new, and no file can be taken for another. A file says in its metadata
which layers it has and of what, so it also serves heads that read fewer of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle_export.files import whole_file
from eagle_export.output_folder import free_space
from eagle_export.train.batches import pack
from eagle_export.train.samples import Samples, Shard
from eagle_export.train.ttt import Batch
from eagle_run.errors import EagleError

_VERSION = 1
_FORWARD = 4096  # tokens of a target forward


class BatchSource(Protocol):
    """Gives batches."""

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        """The conversations of these numbers, side by side."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Of one conversation or several joined: features [t, n*H], last [t, H], best int32 [t]."""

    features: Tensor
    last: Tensor
    best: Tensor


@dataclass(frozen=True, eq=False)
class TargetFeatures:
    """Runs a target over token ids.

    model: a Transformers causal LM. layers: indices into its hidden_states. dtype: of what is given back.
    """

    model: Any
    layers: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def rows(self, tokens: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens int64 [B, T], padded at the end; asked bool [B, T]: rows whose best token is wanted.

        Gives features [B, T, n*H], last [B, T, H] and best int64 [B, T] (0 where not asked).
        """
        device = self.model.device
        with torch.no_grad():
            out = self.model.model(input_ids=tokens.to(device), use_cache=False, output_hidden_states=True)
            states = [out.hidden_states[layer] for layer in self.layers]
            best = torch.zeros_like(tokens, device=device)
            where = asked.to(device)
            head = self.model.get_output_embeddings()
            chosen = [head(part).argmax(-1) for part in out.last_hidden_state[where].split(1024)]
            if chosen:
                best[where] = torch.cat(chosen)
            return torch.cat(states, -1).to(self.dtype), out.last_hidden_state.to(self.dtype), best


class OnTheFly:
    """Batches whose features are computed when they are asked for."""

    def __init__(self, samples: Samples, target: TargetFeatures, max_length: int) -> None:
        self.samples, self.target, self.max_length = samples, target, max_length

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        tokens, answers = _side_by_side(self.samples, numbers, self.max_length)
        features, last, best = self.target.rows(tokens, _asked(answers))
        return Batch(*(x.to(device) for x in (tokens, answers, features, last, best)))


class Cached:
    """Batches from the files of a cache, which `fill_cache` has made. layers: which of theirs are read."""

    def __init__(
        self, samples: Samples, files: Sequence[Path], layers: tuple[int, ...], max_length: int
    ) -> None:
        from safetensors import safe_open

        self.samples, self.layers, self.max_length = samples, layers, max_length
        self._files = [safe_open(path, framework="pt") for path in files]
        # Files that do not say their layers are of a time when they had to be the very ones.
        self._stored = [_metadata(file).layers or layers for file in self._files]

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        tokens, answers = _side_by_side(self.samples, numbers, self.max_length)
        tensors: list[Tensor] = []
        for name in ("features", "last", "best"):
            parts = [self._part(number, name) for number in numbers]
            whole = parts[0].new_zeros(*tokens.shape, *parts[0].shape[1:])
            for row, part in zip(whole, parts, strict=True):
                row[: len(part)] = part
            tensors.append(whole)
        features, last, best = tensors
        return Batch(*(x.to(device) for x in (tokens, answers, features, last, best.long())))

    def _part(self, number: int, name: str) -> Tensor:
        shard, at = self.samples.where(number)
        offsets = self.samples.shards[shard].offsets
        rows = slice(int(offsets[at]), min(int(offsets[at + 1]), int(offsets[at]) + self.max_length))
        whole, stored = self._files[shard].get_slice(name), self._stored[shard]
        if name != "features" or stored == self.layers:
            return whole[rows]
        width = whole.get_shape()[1] // len(stored)
        places = [stored.index(layer) * width for layer in self.layers]
        return torch.cat([whole[rows, place : place + width] for place in places], -1)


@dataclass(frozen=True)
class _Metadata:
    """What a file says of its features: their layers, and a hash of all else that decides them."""

    layers: tuple[int, ...] = ()
    content: str = ""


def _metadata(file: Any) -> _Metadata:
    facts = file.metadata() or {}
    layers = tuple(int(layer) for layer in facts.get("layers", "").split(",") if layer)
    return _Metadata(layers, facts.get("content", ""))


def _name(shard: Shard, target_sha256: str, target: TargetFeatures, layers: str, max_length: int) -> str:
    """A hash of all that decides the features of a shard."""
    computed = str(getattr(target.model, "dtype", ""))
    identity = f"{_VERSION} {target_sha256} {layers} {target.dtype} {computed} {shard.sha256}"
    identity += hashlib.sha256(shard.answers.numpy().tobytes()).hexdigest()
    if int(shard.offsets.diff().max()) > max_length:  # what is cut off is not there for a longer run
        identity += f" {max_length}"
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def cache_files(
    folder: Path, samples: Samples, target_sha256: str, target: TargetFeatures, *, max_length: int
) -> list[Path]:
    """Where the features of each shard are kept, which are those of the first `max_length` tokens of each.

    A file that is there already, with these layers and more, is taken as it is.
    """
    from safetensors import SafetensorError, safe_open

    wider: dict[str, Path] = {}  # by content
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, SafetensorError), safe_open(path, framework="pt") as file:
            kept = _metadata(file)
            if kept.content and set(target.layers) <= set(kept.layers):
                wider[kept.content] = path
    files = []
    for shard in samples.shards:
        of = partial(_name, shard, target_sha256, target, max_length=max_length)
        exact = folder / f"{of(layers=str(target.layers))}.safetensors"
        files.append(exact if exact.is_file() else wider.get(of(layers="any"), exact))
    return files


def fill_cache(
    folder: Path,
    samples: Samples,
    target_sha256: str,
    target: TargetFeatures,
    on_progress: Callable[[float, str], None],
    *,
    max_length: int,
) -> None:
    """Computes the shards that are not there yet; one that is finished stays when this is interrupted.

    Raises EagleError where the disk has no room for them.
    """
    files = cache_files(folder, samples, target_sha256, target, max_length=max_length)
    missing = [(shard, path) for shard, path in zip(samples.shards, files, strict=True) if not path.is_file()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    width = (len(target.layers) + 1) * target.model.config.hidden_size
    tokens = sum(len(shard.tokens) for shard, _ in missing)
    needed, free = tokens * (width * target.dtype.itemsize + 4), free_space(folder)
    if needed > free:
        raise EagleError(
            f"{folder}: the features need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            hint="compute them on the fly, keep them on another disk, or use less data",
            parameters=["on_the_fly", "features_cache"],
        )
    done = 0
    for shard, path in missing:

        def progress(count: int, name: str = shard.name, before: int = done) -> None:
            on_progress((before + count) / tokens, f"{before + count:,} of {tokens:,} tokens ({name})")

        content = _name(shard, target_sha256, target, "any", max_length)
        metadata = {"layers": ",".join(map(str, target.layers)), "content": content}
        _write(path, _shard_rows(shard, target, max_length, progress), metadata)
        done += len(shard.tokens)


def _shard_rows(
    shard: Shard, target: TargetFeatures, max_length: int, on_progress: Callable[[int], None]
) -> Rows:
    """All rows of a shard, in its order, computed in forwards of conversations of similar lengths."""
    samples = Samples((shard,))
    total, width = len(shard.tokens), target.model.config.hidden_size
    features = torch.zeros(total, len(target.layers) * width, dtype=target.dtype)
    last = torch.zeros(total, width, dtype=target.dtype)
    best = torch.zeros(total, dtype=torch.int32)
    lengths = samples.lengths()
    done = 0
    for numbers in pack(lengths, lengths.argsort(stable=True), _FORWARD):
        tokens, answers = _side_by_side(samples, numbers, max_length)
        parts = target.rows(tokens, _asked(answers))
        for row, number in enumerate(numbers):
            first = int(shard.offsets[number])
            length = min(int(lengths[number]), max_length)
            for whole, part in zip((features, last, best), parts, strict=True):
                whole[first : first + length] = part[row, :length].to("cpu", whole.dtype)
            done += int(lengths[number])
        on_progress(done)
    return Rows(features, last, best)


def _write(path: Path, rows: Rows, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    tensors = {"features": rows.features, "last": rows.last, "best": rows.best}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _side_by_side(samples: Samples, numbers: Sequence[int], max_length: int) -> tuple[Tensor, Tensor]:
    """tokens int64 [B, T] and answers bool [B, T], padded at the end and cut to `max_length`."""
    conversations = [samples.conversation(number) for number in numbers]
    width = min(max_length, max(3, *(len(tokens) for tokens, _ in conversations))) if conversations else 3
    tokens = torch.zeros(len(conversations), width, dtype=torch.long)
    answers = torch.zeros(len(conversations), width, dtype=torch.bool)
    for row, (ids, mask) in enumerate(conversations):
        length = min(len(ids), width)
        tokens[row, :length], answers[row, :length] = ids[:length], mask[:length]
    return tokens, answers


def _asked(answers: Tensor) -> Tensor:
    """Rows whose next token is an answer's: their best token is compared with drafts."""
    asked = torch.zeros_like(answers)
    asked[:, :-1] = answers[:, 1:]
    return asked
