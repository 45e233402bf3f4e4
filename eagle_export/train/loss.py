"""The losses of a head, with gradients that are made while the logits are at hand.

[N, Vd] logits of K steps would fill memory several times over, so lm_head, softmax and cross-entropy are one
function over chunks of rows: a chunk's logits become its gradient in place and are gone. The result is that
of the plain formula (tested), not an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 512  # rows; their logits should stay in a processor's cache


@dataclass(frozen=True, eq=False)
class Goal:
    """What the target says in some of its rows.

    probabilities float32 [M, Vd]: its distribution within the draft vocabulary, renormalised as in the
    reference. best int64 [M]: draft id of its most likely token of all, -1 where the draft has no such token.
    """

    probabilities: Tensor
    best: Tensor


def target_goal(last: Tensor, best: Tensor, head: Tensor, own: Tensor, *, top: int = 0) -> Goal:
    """The goal from the target's normed hidden states.

    last [M, H], best int64 [M] (target ids), head [Vd, H]: the target's lm_head in the draft vocabulary,
    own int64 [V]: draft id of a target id. top: keep only that many of the best tokens,
    renormalised (0: all).
    """
    with torch.no_grad():
        logits = torch.cat([part.to(head.dtype) @ head.T for part in last.split(4 * CHUNK)]).float()
        if top:
            least = logits.topk(min(top, logits.shape[1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return Goal(logits.softmax(-1), own[best])


@dataclass(frozen=True, eq=False)
class StepLoss:
    """loss: scalar, Σ w·ce. cross_entropy float32 [R] and guess int64 [R] (draft ids) carry no gradient."""

    loss: Tensor
    cross_entropy: Tensor
    guess: Tensor


def soft_cross_entropy(hidden: Tensor, head: Tensor, goal: Tensor, index: Tensor, weight: Tensor) -> StepLoss:
    """Σ_r weight_r · (−Σ_v p_v log q_v) with q = softmax(hidden_r · headᵀ) and p = goal[index_r].

    hidden [R, Hd] after the head's norm, head [Vd, Hd], goal float32 [M, Vd], index int64 [R], weight float32
    [R]; differentiable in hidden and head.
    """
    loss, entropy, guess = _SoftCrossEntropy.apply(hidden, head, goal, index, weight, torch.is_grad_enabled())
    return StepLoss(loss, entropy, guess)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        goal: Tensor,
        index: Tensor,
        weight: Tensor,
        learning: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
        narrow, table = hidden.to(kind), head.to(kind)
        grad_hidden = torch.empty_like(hidden) if learning and ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if learning and ctx.needs_input_grad[1] else None
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        guess = torch.empty_like(index)
        for first in range(0, len(hidden), CHUNK):
            part = slice(first, first + CHUNK)
            logits = narrow[part] @ table.T  # [r, Vd]
            guess[part] = logits.argmax(-1)
            log_q = torch.log_softmax(logits, -1, dtype=torch.float32)
            p = goal[index[part]]
            entropy[part] = -torch.mul(log_q, p).sum(-1)
            if grad_hidden is None:
                continue
            slope = log_q.exp_().sub_(p).mul_(weight[part, None]).to(kind)  # w · (q − p)
            grad_hidden[part] = slope @ table
            if grad_head is not None:
                if kind == head.dtype:
                    grad_head.addmm_(slope.T, narrow[part])
                else:
                    grad_head += slope.T @ narrow[part]
        ctx.grads = grad_hidden, grad_head
        ctx.mark_non_differentiable(entropy, guess)
        return (entropy * weight).sum(), entropy, guess

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.grads
        ctx.grads = None  # used up: once per forward
        scaled = None if grad_hidden is None else grad_hidden.mul_(grad)
        return scaled, None if grad_head is None else grad_head.mul_(grad), None, None, None, None


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def feature_loss(raw: Tensor, last: Tensor, weight: Tensor) -> Tensor:
    """EAGLE-1's regression: Σ_r weight_r · mean over the width of SmoothL1(raw, last). raw, last [R, H]."""
    each = F.smooth_l1_loss(raw.float(), last.float(), reduction="none").mean(-1)  # [R]
    return (each * weight).sum()
