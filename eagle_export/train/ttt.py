"""Training-time test: the draft unrolled over whole conversations, as it will be used.

Pair t of a conversation is (token x_{t+1}, feature f_t) at position t, and predicts x_{t+2}. Step 0 runs the
draft over all pairs. At step i the row that started at s takes its own raw output of step i-1 for the hidden,
token x_{s+1+i} and position s+i, and predicts x_{s+2+i}, whose distribution the target gave in its row s+1+i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_export.models.head import Draft, Fuse
from eagle_export.train.attention import UnrolledAttention


@dataclass(frozen=True, eq=False)
class Batch:
    """Conversations side by side, padded at the end, with what the target made of them.

    tokens int64 [B, T]; answers bool [B, T], true for tokens to learn from (never padding); features
    [B, T, n*H]; last [B, T, H], the target's last hidden state after its final norm; best int64 [B, T], the
    target's most likely next token, valid where the next token is in `answers`.
    """

    tokens: Tensor
    answers: Tensor
    features: Tensor
    last: Tensor
    best: Tensor


@dataclass(frozen=True, eq=False)
class Unrolled:
    """What K steps gave. Row n started at flat index rows[n] = b * T + s.

    raw     K tensors [N, Hd]: the layer's output before its norm.
    labels  int64 [K, N]: flat index of the target's row whose distribution step i should predict.
    valid   bool [K, N]: that row exists, and the token that follows it is an answer's.
    """

    rows: Tensor
    raw: list[Tensor]
    labels: Tensor
    valid: Tensor


def starts(batch: Batch) -> Tensor:
    """int64 [N]: flat indices of the pairs that predict a token of an answer."""
    predicted = batch.answers[:, 2:]  # pair s predicts token s+2
    mask = torch.zeros_like(batch.answers)
    mask[:, :-2] = predicted
    return mask.flatten().nonzero().flatten()


def label_rows(batch: Batch, rows: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """labels int64 [K, N] and valid bool [K, N] of `Unrolled`: labels and mask move together."""
    length = batch.tokens.shape[1]
    start = rows % length  # s
    step = torch.arange(steps, device=rows.device)[:, None]
    label = start + 1 + step  # [K, N]: column of the target's row
    inside = label + 1 < length
    label = label.clamp(max=length - 2)
    flat = (rows - start) + label
    # A draft's path ends where the answer does: all tokens up to the predicted one belong to it.
    answered = batch.answers.flatten()[flat + 1] & inside
    return flat, answered.long().cumprod(0).bool()


def unroll(
    fuse: Fuse | None,
    draft: Draft,
    batch: Batch,
    steps: int,
    *,
    noise: Callable[[Tensor], Tensor] | None = None,
) -> Unrolled:
    """Runs the draft for `steps` steps. noise: changes the target's features first, as EAGLE-1's training."""
    count, length = batch.tokens.shape
    dtype = draft.lm_head.weight.dtype
    features = batch.features.to(dtype)
    features = features if noise is None else noise(features)
    hidden = features if fuse is None else fuse(features)  # [B, T, Hd]
    rows = starts(batch)
    start = rows % length
    tokens = batch.tokens.flatten()
    layers = [UnrolledAttention(rows, draft.spec.head_dim**-0.5) for _ in range(draft.spec.layers)]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layers[layer](q, k, v)

    shifted = torch.cat((batch.tokens[:, 1:], batch.tokens[:, -1:]), dim=1)  # x_{t+1}
    position = torch.arange(length, device=rows.device).expand(count, -1)
    whole = draft.run(shifted, hidden, position, attend)  # [B, T, Hd]
    raw = [whole.flatten(0, 1)[rows]]  # [N, Hd]
    for step in range(1, steps):
        back = draft.norm(raw[-1]) if draft.spec.norm_output else raw[-1]
        column = (start + 1 + step).clamp(max=length - 1)
        ids = tokens[rows - start + column]
        raw.append(draft.run(ids[None], back[None], (start + step)[None], attend)[0])
    labels, valid = label_rows(batch, rows, steps)
    return Unrolled(rows, raw, labels, valid)
