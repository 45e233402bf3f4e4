"""Operators with two lives: plain torch when called, one standard ONNX operator (opset 24) when traced.

A model uses these functions wherever a compiler knows the whole operation as one layer: attention, the write
into the KV cache, RMS norm, rotation, picking rows. Called in eager mode they run ordinary torch: they are
differentiable, read nothing back to the host and have no data-dependent shapes, on any device and under
`FakeTensorMode`. Under `torch.export` each becomes one opaque node; `translation.py` says which standard
operator stands for it in ONNX, so that nothing here needs ONNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OPSET = 24


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tree_mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention of T rows over the first KV rows of the cache.

    q [B, Hq, T, Dh], k_cache and v_cache [B, Hkv, S, Dh], tree_mask bool [B, 1, T, KV] (true = row sees
    column; at least one true per row) -> [B, Hq, T, Dh] in q's dtype. Computed in float32.

    q is multiplied by `scale` first and the operator's own scale is 1: TensorRT applies its scale to every
    visible key on every step. 16-bit inputs are widened because its kernels accumulate in the type they are
    given. The slice to KV rows stays in the graph so that a short context does not pay for the whole cache.

    Eager on a GPU, `tree_mask` is what `attention_bias` made of it, once for all layers.
    """
    if tree_mask.dtype != torch.bool:
        return _attention_folded(q, k_cache, v_cache, tree_mask, scale)
    q = q * scale
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.attention(q, k_cache, v_cache, tree_mask)
    return _attention(q, k_cache, v_cache, tree_mask)


def attention_bias(tree_mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The mask in the form in which a GPU's fused attention takes it, for `attention` in place of the mask.

    tree_mask bool [B, 1, T, KV] -> 0 or -inf of `dtype` [B, 1, groups * T, KV]; `groups` = Hq / Hkv.
    """
    bias = torch.full_like(tree_mask, -torch.inf, dtype=dtype).masked_fill_(tree_mask, 0)
    return bias.repeat(1, 1, groups, 1)


def attention_with_sinks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tree_mask: Tensor, *, sinks: Tensor, scale: float
) -> Tensor:
    """`attention` in which each query head may also attend to nothing, with the logit `sinks` [Hq].

    A sink takes its share of the softmax and adds no value. Standard Attention has none, so this is written
    out: products, exponents and sums in float32. A row that sees no key gives 0.
    """
    if tree_mask.dtype != torch.bool:  # what `attention_bias` made of the mask
        tree_mask = tree_mask[:, :, : q.shape[2]] == 0
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.attention_with_sinks(q * scale, k_cache, v_cache, tree_mask, sinks)
    return _attention_with_sinks(q * scale, k_cache, v_cache, tree_mask, sinks)


def narrow_mask(tree_mask: Tensor, position_ids: Tensor, write_index: Tensor, kind: str, span: int) -> Tensor:
    """The tree mask for a layer that looks back less far: bool [B, 1, T, KV] -> bool [B, 1, T, KV].

    kind "window": a row at position p sees positions above p - span. "chunk": those with the same
    position // span. position_ids int64 [B, T], write_index int64 [B].

    Column j of the cache holds position j where it was written before (j < write_index), and the position of
    row j - write_index where this forward writes it. A row that would see nothing (a padded one) keeps what
    the tree mask shows it.
    """
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.narrow_mask(tree_mask, position_ids, write_index, kind, span)
    return _narrow_mask(tree_mask, position_ids, write_index, kind, span)


def cache_update(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Write T new rows into the cache of each sequence, from row `write_index` on.

    cache [B, Hkv, S, Dh], new [B, Hkv, T, Dh], write_index int64 [B] -> the updated cache [B, Hkv, S, Dh].
    Eager: written in place, the same tensor is returned. `write_index + T <= S` is the caller's duty. There
    `write_index` may also be the rows themselves, [B, T], as `cache_rows` works them out once for all layers.
    """
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.cache_update(cache, new, write_index)
    rows = write_index if write_index.dim() == 2 else cache_rows(write_index, new.shape[2])  # [B, T]
    return cache.scatter_(2, rows[:, None, :, None].expand_as(new), new)


def cache_rows(write_index: Tensor, count: int) -> Tensor:
    """The rows that `count` new ones are written to: write_index int64 [B] -> [B, count]."""
    return write_index[:, None] + torch.arange(count, device=write_index.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis: x [..., H], weight [H] -> [..., H] in x's dtype; statistics in float32."""
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.rms_norm(x, weight, eps)
    if x.is_cuda:  # one kernel in place of eight; only the last rounding is another
        return F.rms_norm(x, weight.shape, weight, eps)
    return _rms_norm(x, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the two halves of each head ("rotate-half" order, as Transformers and ONNX `interleaved=0`).

    x [B, h, T, Dh], cos and sin [B, T, R/2] with even R <= Dh -> [B, h, T, Dh]. Channels from R on stay as
    they are. `interleaved`: pairs are neighbouring channels (as complex numbers are stored), and R = Dh.
    """
    if cos.dtype != x.dtype:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if torch.compiler.is_exporting():
        traced = torch.ops.eagle_export
        return traced.rotary_pairs(x, cos, sin) if interleaved else traced.rotary(x, cos, sin)
    if interleaved:
        return _rotary_pairs(x, cos, sin)
    if x.is_cuda and 2 * cos.shape[-1] == x.shape[-1]:
        return _rotary_in_place(x, cos, sin)
    return _rotary(x, cos, sin)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]. One node in a trace, which torch would take apart."""
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def gather_rows(h: Tensor, index: Tensor) -> Tensor:
    """Pick rows of each sequence: h [B, T, H], index int64 [B, R] -> [B, R, H]."""
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.gather_rows(h, index)
    return _gather_rows(h, index)


def _attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tree_mask: Tensor) -> Tensor:
    kv = tree_mask.shape[3]
    k, v = k_cache[:, :, :kv], v_cache[:, :, :kv]  # [B, Hkv, KV, Dh]
    if q.dtype != torch.float32:
        out = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=tree_mask, scale=1.0, enable_gqa=True
        )
        return out.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=tree_mask, scale=1.0, enable_gqa=True)


def _attention_folded(q: Tensor, k_cache: Tensor, v_cache: Tensor, bias: Tensor, scale: float) -> Tensor:
    """`_attention` with the query heads that share a key head as further rows of one head.

    A GPU's fused kernels take a mask or groups of heads, not both; folded there are no groups, and keys and
    values are read once for all of them, not repeated. The kernels add up in float32, whatever
    type they are given.
    """
    batch, _, rows, width = q.shape
    kv = bias.shape[3]
    folded = q.reshape(batch, k_cache.shape[1], -1, width)  # [B, Hkv, G * T, Dh]
    out = F.scaled_dot_product_attention(
        folded, k_cache[:, :, :kv], v_cache[:, :, :kv], attn_mask=bias, scale=scale
    )
    apart = out.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4)  # [B, T, Hkv, G, Dh]
    return apart.flatten(2, 3).transpose(1, 2)  # [B, Hq, T, Dh]


def _attention_with_sinks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tree_mask: Tensor, sinks: Tensor
) -> Tensor:
    kv, rows, groups = tree_mask.shape[3], q.shape[2], k_cache.shape[1]
    folded = q.float().unflatten(1, (groups, -1)).flatten(2, 3)  # [B, Hkv, G * T, Dh]: keys are read once
    scores = folded @ k_cache[:, :, :kv].float().transpose(2, 3)  # [B, Hkv, G * T, KV]
    scores = scores.unflatten(2, (-1, rows)).flatten(1, 2)  # [B, Hq, T, KV]
    scores = scores.masked_fill(~tree_mask, -torch.inf)
    sink = sinks.float()[None, :, None, None]  # [1, Hq, 1, 1]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)  # [B, Hq, T, 1]
    shares = (scores - top).exp()
    total = shares.sum(-1, keepdim=True) + (sink - top).exp()
    folded = shares.unflatten(1, (groups, -1)).flatten(2, 3) @ v_cache[:, :, :kv].float()
    out = folded.unflatten(2, (-1, rows)).flatten(1, 2)  # [B, Hq, T, Dh]
    return (out / total).to(q.dtype)


def _narrow_mask(
    tree_mask: Tensor, position_ids: Tensor, write_index: Tensor, kind: str, span: int
) -> Tensor:
    columns = torch.arange(tree_mask.shape[3], device=tree_mask.device)[None]  # [1, KV]
    row = columns - write_index[:, None]  # [B, KV]: the row of this forward that a column holds
    new = position_ids.gather(1, row.clamp(0, position_ids.shape[1] - 1))  # [B, KV]
    held = torch.where(row < 0, columns, new)[:, None, None]  # [B, 1, 1, KV]
    own = position_ids[:, None, :, None]  # [B, 1, T, 1]
    near = own - held < span if kind == "window" else own // span == held // span  # [B, 1, T, KV]
    blind = ~(tree_mask & near).any(-1, keepdim=True)  # [B, 1, T, 1]
    return tree_mask & (near | blind)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, R/2]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, Dh/2]
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def _rotary_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`_rotary` of whole heads in three kernels: on a GPU small ones cost more than what they compute."""
    halves = x.unflatten(-1, (2, -1))  # [B, h, T, 2, Dh/2]
    sin = sin[:, None]  # [B, 1, T, Dh/2]
    turned = halves * cos[:, None, :, None]
    turned[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(halves[..., 0, :], sin)
    return turned.flatten(-2)


def _gather_rows(h: Tensor, index: Tensor) -> Tensor:
    return h.gather(1, index[:, :, None].expand(-1, -1, h.shape[2]))


# --- what a trace records -----------------------------------------------------------------------------------
# One functional torch operator each. They can be run as well, so an exported program is executable, but the
# functions above do not go through them: these have no gradient, and the cache write copies.

_library = torch.library.Library("eagle_export", "DEF")


def _define(schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"eagle_export::{name}", fake, lib=_library)


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor",
    lambda q, k, v, mask: _attention(q, k, v, mask).contiguous(),
    _like_first,
)
_define(
    "cache_update(Tensor cache, Tensor new, Tensor index) -> Tensor",
    lambda cache, new, index: cache_update(cache.clone(), new, index),
    _like_first,
)
_define(
    "attention_with_sinks(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor sinks) -> Tensor",
    lambda *args: _attention_with_sinks(*args).contiguous(),
    _like_first,
)
_define(
    "narrow_mask(Tensor mask, Tensor position_ids, Tensor write_index, str kind, int span) -> Tensor",
    _narrow_mask,
    _like_first,
)
_define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _like_first)
_define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotary, _like_first)
_define("rotary_pairs(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotary_pairs, _like_first)
_define(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    F.linear,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
_define(
    "gather_rows(Tensor h, Tensor index) -> Tensor",
    _gather_rows,
    lambda h, index: h.new_empty(index.shape[0], index.shape[1], h.shape[2]),
)
