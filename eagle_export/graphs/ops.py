"""Operators with two lives: plain torch when called, one standard ONNX operator (opset 24) when traced.

A model uses these functions wherever a compiler knows the whole operation as one layer: attention, the write
into the KV cache, RMS norm, rotation, picking rows. Called in eager mode they run ordinary torch: they are
differentiable, read nothing back to the host and have no data-dependent shapes, on any device and under
`FakeTensorMode`. Under `torch.export` each becomes one opaque node, and `TRANSLATION` tells
`torch.onnx.export` which standard operator to write for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from onnxscript.values import Opset
from torch import Tensor

OPSET = 24
_op = Opset("", OPSET)
_ONNX_FLOAT = 1  # onnx.TensorProto.FLOAT


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tree_mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention of T rows over the first KV rows of the cache.

    q [B, Hq, T, Dh], k_cache and v_cache [B, Hkv, S, Dh], tree_mask bool [B, 1, T, KV] (true = row sees
    column; at least one true per row) -> [B, Hq, T, Dh] in q's dtype. Computed in float32.

    q is multiplied by `scale` first and the operator's own scale is 1: TensorRT applies its scale to every
    visible key on every step. 16-bit inputs are widened because its kernels accumulate in the type they are
    given. The slice to KV rows stays in the graph so that a short context does not pay for the whole cache.
    """
    q = q * scale
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.attention(q, k_cache, v_cache, tree_mask)
    return _attention(q, k_cache, v_cache, tree_mask)


def cache_update(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Write T new rows into the cache of each sequence, from row `write_index` on.

    cache [B, Hkv, S, Dh], new [B, Hkv, T, Dh], write_index int64 [B] -> the updated cache [B, Hkv, S, Dh].
    Eager: written in place, the same tensor is returned. `write_index + T <= S` is the caller's duty.
    """
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.cache_update(cache, new, write_index)
    rows = write_index[:, None] + torch.arange(new.shape[2], device=new.device)  # [B, T]
    return cache.scatter_(2, rows[:, None, :, None].expand_as(new), new)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis: x [..., H], weight [H] -> [..., H] in x's dtype; statistics in float32."""
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head ("rotate-half" order, as Transformers and ONNX `interleaved=0`).

    x [B, h, T, Dh], cos and sin [B, T, R/2] with even R <= Dh -> [B, h, T, Dh]. Channels from R on stay as
    they are.
    """
    if cos.dtype != x.dtype:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if torch.compiler.is_exporting():
        return torch.ops.eagle_export.rotary(x, cos, sin)
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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, R/2]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


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
_define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _like_first)
_define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotary, _like_first)
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


# --- what the graph holds -----------------------------------------------------------------------------------
# The arguments are onnx_ir values; `_op` records nodes into the graph being built.


def _onnx_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    width = _op.Shape(mask, start=3, end=4)  # KV
    k, v = _op.Slice(k, [0], width, [2]), _op.Slice(v, [0], width, [2])
    if q.dtype == _ONNX_FLOAT:
        return _op.Attention(q, k, v, mask, scale=1.0)[0]  # the other outputs are optional and dropped later
    wide = [_op.Cast(x, to=_ONNX_FLOAT) for x in (q, k, v)]
    return _op.Cast(_op.Attention(*wide, mask, scale=1.0)[0], to=int(q.dtype))


def _onnx_cache_update(cache: Any, new: Any, index: Any) -> Any:
    return _op.TensorScatter(cache, new, index, axis=2, mode="linear")


def _onnx_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return _op.RMSNormalization(x, weight, axis=-1, epsilon=eps, stash_type=1)


def _onnx_rotary(x: Any, cos: Any, sin: Any) -> Any:
    rotated, width = 2 * cos.shape[-1], x.shape[-1]
    return _op.RotaryEmbedding(x, cos, sin, rotary_embedding_dim=0 if rotated == width else rotated)


def _onnx_linear(x: Any, weight: Any, bias: Any) -> Any:
    product = _op.MatMul(x, _op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else _op.Add(product, bias)


def _onnx_gather_rows(h: Any, index: Any) -> Any:
    return _op.GatherND(h, _op.Unsqueeze(index, [-1]), batch_dims=1)


def _onnx_to_dtype(x: Any, dtype: int, *_: Any, **__: Any) -> Any:
    return _op.Identity(x) if x.dtype == dtype else _op.Cast(x, to=dtype)


TRANSLATION: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.eagle_export.attention.default: _onnx_attention,
    torch.ops.eagle_export.cache_update.default: _onnx_cache_update,
    torch.ops.eagle_export.rms_norm.default: _onnx_rms_norm,
    torch.ops.eagle_export.rotary.default: _onnx_rotary,
    torch.ops.eagle_export.linear.default: _onnx_linear,
    torch.ops.eagle_export.gather_rows.default: _onnx_gather_rows,
    torch.ops.aten.to.dtype: _onnx_to_dtype,  # the only common operator that the exporter does not know
}
