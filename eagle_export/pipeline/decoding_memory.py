"""Do a bundle's limits make sense? What decoding takes at them, beside the weights, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle_export.inspection.describe import size
from eagle_run.dtypes import BY_PRECISION
from eagle_run.errors import EagleError

if TYPE_CHECKING:
    from eagle_export.heads.spec import HeadSpec
    from eagle_run.bundle.manifest import Limits, TreeDefaults

LIMITS = ("max_batch", "max_seq_len", "prefill_chunk", "max_tree_nodes")
_SHORT, _SMALL_CHUNK = 32, 8  # tokens below which a bundle is hardly of use
_LARGE_GPU = 300e9  # bytes: more than any GPU has


@dataclass(frozen=True)
class DecodingMemory:
    """Bytes that decoding takes beside the weights.

    caches, buffers: of each of the sequences that are side by side: keys and values of target and draft in
    all their rows; what the graphs read and write in the largest round. prefill: of the one prompt that is
    read at a time.
    """

    caches: int
    buffers: int
    prefill: int

    def of(self, batch: int) -> int:
        """For so many sequences side by side."""
        return batch * (self.caches + self.buffers) + self.prefill

    def largest_batch(self, memory_bytes: int) -> int:
        """How many sequences fit; 0 where not even one does."""
        return max(0, (memory_bytes - self.prefill) // (self.caches + self.buffers))

    def as_dict(self, batch: int) -> dict[str, int]:
        """As plain data."""
        return {
            "max_batch": batch,
            "sequence_bytes": self.caches + self.buffers,
            "memory_bytes": self.of(batch),
        }


def weigh_decoding(
    config: Any, spec: HeadSpec | None, limits: Limits, tree: TreeDefaults | None, dtype: str
) -> DecodingMemory:
    """What decoding takes at `limits`, from sizes alone: no weight is looked at.

    config: the target's of Transformers. spec, tree: of the head, None without one. dtype: of caches.
    """
    from eagle_export.models.target import target_dims

    dims, width = target_dims(config), BY_PRECISION[dtype].bytes
    rows, nodes, chunk = limits.cache_rows, limits.max_tree_nodes, limits.prefill_chunk
    cache = 2 * dims.layers * dims.kv_heads * dims.head_dim * rows * width
    features, draft_cache, draft_token, draft_logits = dims.hidden_size, 0, 0, 0
    if spec is not None:
        features = spec.feature_width
        draft_cache = 2 * spec.layers * spec.kv_heads * spec.head_dim * rows * width
        draft_token = 2 * spec.hidden_size * width + rows  # hidden in and out, and a row of the mask
        draft_logits = 4 * spec.draft_vocab_size
    level = 0 if tree is None else max(tree.top_k or 1, 1)  # nodes that the draft looks at together
    token = features * width + rows + draft_token
    logits = 4 * dims.vocab_size
    return DecodingMemory(
        caches=cache + draft_cache,
        buffers=nodes * (token + logits) + level * draft_logits,
        prefill=chunk * token + logits + draft_logits + (cache + draft_cache if limits.max_batch > 1 else 0),
    )


def check_limits(
    limits: Limits, needed: DecodingMemory, memory: tuple[int, int], asked: Sequence[str], *, compiles: bool
) -> tuple[str, ...]:
    """Warnings, one sentence each, for limits that are of little use here.

    memory: bytes of this machine that are available, and all of them. asked: the limits that the user named.
    compiles: whether the bundle is for engines, which run elsewhere. Raises EagleError, with figures, for a
    bundle for CPUs whose limits take more than twice the memory of this machine; a recipe's own are only
    warned of.
    """
    notes = []
    if limits.max_seq_len < _SHORT:
        notes.append(f"warning: a prompt and its answer have {limits.max_seq_len} tokens together")
    if limits.prefill_chunk < min(_SMALL_CHUNK, limits.max_seq_len):
        notes.append(f"warning: prompts are read {limits.prefill_chunk} tokens at a time, which is slow")
    whole, (available, total) = needed.of(limits.max_batch), memory
    text = (
        f"decoding {_sequences(limits.max_batch)} of {limits.max_seq_len} tokens takes about {size(whole)} "
        f"of memory for caches and buffers, {size(needed.caches + needed.buffers)} each"
    )
    if compiles:
        if whole > _LARGE_GPU:
            notes.append(f"warning: {text}: more than a GPU has")
    elif whole > 2 * total and asked:
        raise EagleError(
            f"{text}; there are {size(total)} in all",
            hint=_remedy(needed.largest_batch(total)),
            parameters=asked,
        )
    elif whole > available:
        notes.append(f"warning: {text}, {size(available)} are available: not all of them may fit")
    return tuple(notes)


def asked_limits(options: Any) -> Sequence[str]:
    """The limits that the options of a build name themselves."""
    return tuple(name for name in LIMITS if getattr(options, name) is not None)


def _remedy(batch: int) -> str:
    if batch < 1:
        return "not even one such sequence fits: make it shorter"
    return f"{_sequences(batch)} of this length {'fit' if batch > 1 else 'fits'}, or more that are shorter"


def _sequences(count: int) -> str:
    return f"{count:,} sequences" if count != 1 else "1 sequence"
