"""Chunked prefill: fills the caches with a prompt, all but its last token, which becomes the first root.

The first round then starts from the same state as every later one: n tokens in the target cache, a root,
and one pending pair. A prompt of any length costs the memory of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_run.session import Session, State

# Row counts that a chunk is rounded up to, so that few shapes are bound (and, on a GPU, captured).
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def prefill(session: Session, state: State, prompts: Sequence[Sequence[int]], *, chunk: int) -> None:
    """Writes the KV of `prompts` (one a slot, each of at least one token) and sets `state` for a first round.

    `chunk` is the most tokens of a slot in one forward. Slots of different lengths run side by side; the
    rows that a shorter one has too many write KV behind its end, which later rounds overwrite.
    """
    device = session.device
    cached = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    state.length.copy_(cached)
    state.root.copy_(torch.tensor([prompt[-1] for prompt in prompts], device=device))
    state.pending_count.copy_(cached.clamp(max=1))
    state.pending_tokens[:, 0] = state.root
    state.active.fill_(True)
    longest = max(len(prompt) for prompt in prompts) - 1
    for start in range(0, longest, chunk):
        rows = round_up(min(chunk, longest - start), _ROWS, most=chunk)
        tokens = _padded(prompts, start, rows + 1).to(device)
        _prefill_chunk(session, state, tokens, start)


def _prefill_chunk(session: Session, state: State, tokens: Tensor, start: int) -> None:
    """tokens [B, rows + 1]: the chunk's tokens, and the one after them for the last pair of the draft."""
    rows = tokens.shape[1] - 1
    kv = kv_bucket(start + rows, session.cache_rows)
    write_index = state.length.clamp(max=start)  # [B]
    positions = write_index[:, None] + torch.arange(rows, device=session.device)  # [B, rows]
    causal = (torch.arange(kv, device=session.device) <= positions[:, :, None])[:, None]  # [B, 1, rows, kv]
    shared = {
        "position_ids": positions,
        "write_index": write_index,
        "tree_mask": causal,
        "logits_index": torch.zeros_like(state.root)[:, None],  # one row: no logits are wanted yet
    }

    target = session.target(rows, 1, kv)
    fill(target.inputs, input_ids=tokens[:, :-1], **shared)
    target.run()
    if not session.has_draft:
        return
    features = target.outputs["features"]  # [B, rows, n*H]
    last = state.length - 1 - start  # the row of a slot's last pair, where this chunk holds it
    here = (last >= 0) & (last < rows)
    row = last.clamp(0, rows - 1)[:, None, None].expand(-1, 1, features.shape[2])
    pending = features.gather(1, row)[:, 0]
    state.pending_features[:, 0] = torch.where(here[:, None], pending, state.pending_features[:, 0])

    hidden = session.fuse(features)
    draft = session.draft(rows, 1, kv)
    fill(draft.inputs, input_ids=tokens[:, 1:], hidden=hidden, **shared)
    draft.run()


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


def _padded(prompts: Sequence[Sequence[int]], start: int, size: int) -> Tensor:
    """i64 [B, size]: tokens start … start + size of each prompt, zeros where it is over."""
    rows = [list(prompt[start : start + size]) for prompt in prompts]
    return torch.tensor([row + [0] * (size - len(row)) for row in rows], dtype=torch.int64)
