"""Chunked prefill: fills a slot's caches with a prompt, all but its last token, which becomes the first root.

The first round then starts from the same state as every later one: n tokens in the target cache, a root,
and one pending pair. A prompt of any length costs the memory of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_run.engine.model_runner import BatchState, ModelRunner

# Row counts that a chunk is rounded up to, so that few shapes are bound.
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def prefill(runner: ModelRunner, state: BatchState, slot: int, prompt: Sequence[int], *, chunk: int) -> None:
    """Writes the KV of `prompt` (of at least one token) and sets the slot's state for a first round.

    `chunk` is the most tokens in one forward. Other slots, which may be in the middle of their answers, are
    left alone.
    """
    cached = len(prompt) - 1
    for start in range(0, cached, chunk):
        rows = round_up(min(chunk, cached - start), _ROWS, most=chunk)
        tokens = list(prompt[start : start + rows + 1])
        padded = torch.tensor([tokens + [0] * (rows + 1 - len(tokens))], device=runner.device)
        pending = _prefill_chunk(runner, padded, start, last=cached - 1 - start)
        if pending is not None:
            state.pending_features[slot, 0] = pending
    runner.adopt(slot, cached)
    state.length[slot] = cached
    state.root[slot] = prompt[-1]
    state.pending_count[slot] = min(cached, 1)
    if not cached:  # nothing is pending; what an earlier prompt left must not sway the first drafts
        state.pending_features[slot, 0] = 0
    state.pending_tokens[slot, 0] = prompt[-1]
    state.active[slot] = True


def _prefill_chunk(runner: ModelRunner, tokens: Tensor, start: int, *, last: int) -> Tensor | None:
    """tokens [1, rows + 1]: the chunk's tokens, and the one after them for the last pair of the draft.

    Gives the feature [n*H] of row `last`, where the prompt ends, or None if it ends in another chunk.
    """
    device, rows = runner.device, tokens.shape[1] - 1
    kv = kv_bucket(start + rows, runner.cache_rows)
    positions = torch.arange(start, start + rows, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    shared = {
        "position_ids": positions[None],
        "write_index": zero + start,
        "tree_mask": (torch.arange(kv, device=device) <= positions[:, None])[None, None],  # [1, 1, rows, kv]
        "logits_index": zero[:, None],  # one row: no logits are wanted yet
    }

    target = runner.target(rows, 1, kv, staged=True)
    fill(target.inputs, input_ids=tokens[:, :-1], **shared)
    target.run()
    if not runner.has_draft:
        return None
    features = target.outputs["features"]  # [1, rows, n*H]
    hidden = runner.fuse(features, staged=True)
    draft = runner.draft(rows, 1, kv, staged=True)
    fill(draft.inputs, input_ids=tokens[:, 1:], hidden=hidden, **shared)
    draft.run()
    return features[0, last] if last < rows else None


def fill(buffers: dict[str, Tensor], **values: Tensor) -> None:
    """Copies each value into the buffer of its name."""
    for name, value in values.items():
        buffers[name].copy_(value)


def round_up(size: int, sizes: Sequence[int], *, most: int) -> int:
    """The smallest of `sizes` that holds `size`, but never more than `most`."""
    return min(next((step for step in sizes if step >= size), most), most)


def kv_bucket(rows: int, most: int) -> int:
    """The width of cache to attend to, for `rows` used rows: 128, 160, 192, 224, 256, 320, … up to `most`.

    Four steps an octave: at most a quarter too wide (on two cores a hundred unused rows cost 3% of a
    forward), and few enough widths to bind them all.
    """
    width, step = 128, 32
    while width < rows:
        width += step
        if width == 8 * step:
            step *= 2
    return min(width, most)
