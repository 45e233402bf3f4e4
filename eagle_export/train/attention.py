"""Attention of training-time test: the sequence's keys causally, and a row's own drafts on the diagonal.

At unrolled step i the row that started at s sees the keys of step 0 up to s, and of the steps 1..i only its
own: O(T²) + O(K·T) (EAGLE-3, arXiv 2503.01840, section 3.2). Both parts are one softmax. Its first part is a
causal attention whose log-sum-exp is known, so the second can be merged into it afterwards. On a CPU the
gradient of the first is what the same kernel gives for the merged output and log-sum-exp; elsewhere scores
are made for some rows at a time, and made again for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK = 256  # rows of each sequence whose scores exist together


class UnrolledAttention:
    """The attention of one of a draft's layers, step after step.

    rows: int64 [N] flat indices b * T + s of the rows that go on after step 0.
    """

    def __init__(self, rows: Tensor, scale: float) -> None:
        self.rows, self.scale = rows, scale
        self.keys: Tensor | None = None  # of step 0, [B, Hq, T, Dh]
        self.values: Tensor | None = None
        self.own_keys: list[Tensor] = []  # of each later step, [N, Hq, Dh]
        self.own_values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Step 0: q [B, Hq, T, Dh], k and v [B, Hkv, T, Dh]; later: B is 1 and T is N. -> q's shape."""
        q = q.to(v.dtype)  # rotation may have widened what autocast narrowed
        groups = q.shape[1] // k.shape[1]
        k, v = (x.to(q.dtype).repeat_interleave(groups, dim=1) for x in (k, v))
        if self.keys is None or self.values is None:
            self.keys, self.values = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        self.own_keys.append(k[0].transpose(0, 1))  # [N, Hq, Dh]
        self.own_values.append(v[0].transpose(0, 1))
        own_k, own_v = torch.stack(self.own_keys), torch.stack(self.own_values)  # [i, N, Hq, Dh]
        merged = _Merged.apply if q.device.type == "cpu" else merged_by_chunks
        out = merged(q[0].transpose(0, 1), self.keys, self.values, own_k, own_v, self.rows, self.scale)
        return out.transpose(0, 1)[None]  # [1, Hq, N, Dh]


def merged_by_chunks(  # noqa: PLR0917  (as autograd functions are called)
    q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, rows: Tensor, scale: float
) -> Tensor:
    """q [N, Hq, Dh] over keys [B, Hq, T, Dh] up to its row, and over own_k [i, N, Hq, Dh] -> [N, Hq, Dh].

    Differentiable on any device; [B, Hq, _CHUNK, T] scores at a time, in the gradient too.
    """
    grid = _to_grid(q, keys, rows)  # [B, Hq, T, Dh]
    parts = []
    for begin in range(0, keys.shape[2], _CHUNK):
        seen = slice(begin + _CHUNK)
        inputs = grid[:, :, begin : begin + _CHUNK], keys[:, :, seen], values[:, :, seen]
        parts.append(checkpoint(_causal, *inputs, scale, use_reentrant=False, preserve_rng_state=False))
    out_grid, lse_grid = (torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True))
    first, lse = _from_grid(out_grid, rows), _from_grid(lse_grid[..., None], rows)[..., 0]  # lse [N, Hq]
    own = (q * own_k).float().sum(-1) * scale  # [i, N, Hq]
    share = torch.cat((lse[None], own)).softmax(0)  # [1 + i, N, Hq]
    out = share[0, ..., None] * first + (share[1:, ..., None] * own_v).sum(0)
    return out.to(q.dtype)


def _causal(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The last t of T rows: q [B, Hq, t, Dh], keys and values [B, Hq, T, Dh] -> q's shape; lse [B, Hq, t]."""
    count, length = q.shape[2], keys.shape[2]
    hidden = torch.ones(count, length, dtype=torch.bool, device=q.device).triu(1 + length - count)
    scores = (q @ keys.transpose(-1, -2)).float() * scale  # [B, Hq, t, T]
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values, scores.logsumexp(-1)


class _Merged(torch.autograd.Function):
    """`merged_by_chunks` with the fused kernel of a CPU, which keeps no scores and skips what is masked."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        rows: Tensor,
        scale: float,
    ) -> Tensor:
        grid = _to_grid(q, keys, rows)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out_grid, lse_grid = kernel(grid, keys, values, 0.0, True, scale=scale)
        lse = lse_grid.transpose(1, 2).flatten(0, 1)[rows]  # [N, Hq]
        own = (q * own_k).float().sum(-1) * scale  # [i, N, Hq]
        total = torch.cat((lse[None], own)).logsumexp(0)
        share = (own - total).exp()  # [i, N, Hq]
        first = (lse - total).exp()[..., None] * _from_grid(out_grid, rows)
        out = (first + (share[..., None] * own_v).sum(0)).to(q.dtype)
        ctx.save_for_backward(q, grid, keys, values, own_k, own_v, rows, out, lse_grid, total, share)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, grid, keys, values, own_k, own_v, rows, out, lse_grid, total, share = ctx.saved_tensors
        grad = grad.contiguous()
        mean = (grad * out).float().sum(-1)  # [N, Hq]
        scores = share * ((grad * own_v).float().sum(-1) - mean) * ctx.scale  # [i, N, Hq]
        scores = scores[..., None].to(q.dtype)
        grad_own_v = share[..., None].to(q.dtype) * grad
        # In rows that nobody asks for the gradient is 0, and so is what the kernel makes of them.
        lse = lse_grid.transpose(1, 2).flatten(0, 1).index_copy(0, rows, total.to(lse_grid.dtype))
        lse = lse.unflatten(0, (keys.shape[0], -1)).transpose(1, 2).contiguous()  # [B, Hq, T]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_grid, out_grid = _to_grid(grad, keys, rows), _to_grid(out, keys, rows)
        grad_q, grad_k, grad_v = kernel(
            grad_grid, grid, keys, values, out_grid, lse, 0.0, True, scale=ctx.scale
        )
        grad_q = _from_grid(grad_q, rows) + (scores * own_k).sum(0)
        return grad_q, grad_k, grad_v, scores * q, grad_own_v, None, None


def _to_grid(x: Tensor, like: Tensor, rows: Tensor) -> Tensor:
    """[N, Hq, Dh] -> [B, Hq, T, Dh], zero where there is no row."""
    batch, heads, length, width = like.shape
    grid = x.new_zeros(batch * length, heads, width).index_copy(0, rows, x)
    return grid.unflatten(0, (batch, length)).transpose(1, 2)


def _from_grid(grid: Tensor, rows: Tensor) -> Tensor:
    """[B, Hq, T, Dh] -> [N, Hq, Dh]."""
    return grid.transpose(1, 2).flatten(0, 1)[rows]
