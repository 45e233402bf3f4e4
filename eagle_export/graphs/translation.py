"""Which standard ONNX operator a traced graph gets for each operator of `ops`.

The arguments of the functions are onnx_ir values; `_op` records nodes into the graph being built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.values import Opset

from eagle_export.models import ops
from eagle_run.dtypes import DTYPES

_op = Opset("", ops.OPSET)
_ONNX_FLOAT = DTYPES["float32"].onnx


def _onnx_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    width = _op.Shape(mask, start=3, end=4)  # KV
    k, v = _op.Slice(k, [0], width, [2]), _op.Slice(v, [0], width, [2])
    if q.dtype == _ONNX_FLOAT:
        return _op.Attention(q, k, v, mask, scale=1.0)[0]  # the other outputs are optional and dropped later
    wide = [_op.Cast(x, to=_ONNX_FLOAT) for x in (q, k, v)]
    return _op.Cast(_op.Attention(*wide, mask, scale=1.0)[0], to=int(q.dtype))


def _ints(*values: int) -> Any:
    """A constant int64 vector, where an operator takes any number of inputs and cannot guess their type."""
    return _op.Constant(value_ints=values)


def _onnx_attention_with_sinks(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
    width = _op.Shape(mask, start=3, end=4)  # KV
    dtype, heads, groups, depth = q.dtype, int(q.shape[1]), int(k.shape[1]), int(q.shape[3])
    k, v = _op.Slice(k, [0], width, [2]), _op.Slice(v, [0], width, [2])
    if dtype != _ONNX_FLOAT:
        q, k, v = (_op.Cast(x, to=_ONNX_FLOAT) for x in (q, k, v))
    sink = _op.Reshape(sinks, [1, groups, heads // groups, 1, 1])
    sink = sink if sinks.dtype == _ONNX_FLOAT else _op.Cast(sink, to=_ONNX_FLOAT)
    folded = _op.Reshape(q, [0, groups, -1, depth])  # [B, Hkv, G * T, Dh]
    scores = _op.MatMul(folded, _op.Transpose(k, perm=[0, 1, 3, 2]))  # [B, Hkv, G * T, KV]
    apart = _op.Concat(_ints(0, groups, heads // groups, -1), width, axis=0)
    scores = _op.Reshape(scores, apart)  # [B, Hkv, G, T, KV]
    scores = _op.Where(_op.Unsqueeze(mask, [1]), scores, float(torch.finfo(torch.float32).min))
    top = _op.Max(_op.ReduceMax(scores, [-1]), sink)  # [B, Hkv, G, T, 1]
    shares = _op.Exp(_op.Sub(scores, top))
    total = _op.Add(_op.ReduceSum(shares, [-1]), _op.Exp(_op.Sub(sink, top)))
    joined = _op.Concat(_ints(0, groups, -1), width, axis=0)
    out = _op.MatMul(_op.Reshape(shares, joined), v)  # [B, Hkv, G * T, Dh]
    out = _op.Reshape(out, [0, heads, -1, depth])  # [B, Hq, T, Dh]
    out = _op.Div(out, _op.Reshape(total, [0, heads, -1, 1]))
    return out if dtype == _ONNX_FLOAT else _op.Cast(out, to=int(dtype))


def _onnx_narrow_mask(mask: Any, position_ids: Any, write_index: Any, kind: str, span: int) -> Any:
    width = _op.Squeeze(_op.Shape(mask, start=3, end=4), [0])  # KV
    columns = _op.Unsqueeze(_op.Range(0, width, 1), [0])  # [1, KV]
    row = _op.Sub(columns, _op.Unsqueeze(write_index, [1]))  # [B, KV]
    last = _op.Sub(_op.Shape(position_ids, start=1, end=2), [1])
    new = _op.GatherElements(position_ids, _op.Max(_op.Min(row, last), _ints(0)), axis=1)
    held = _op.Unsqueeze(_op.Where(_op.Less(row, [0]), columns, new), [1, 2])  # [B, 1, 1, KV]
    own = _op.Unsqueeze(position_ids, [1, 3])  # [B, 1, T, 1]
    if kind == "window":
        near = _op.Less(_op.Sub(own, held), [span])
    else:
        near = _op.Equal(_op.Div(own, [span]), _op.Div(held, [span]))
    count = _op.ReduceMax(_op.Cast(_op.And(mask, near), to=_ONNX_FLOAT), [-1])
    blind = _op.Less(count, 0.5)  # [B, 1, T, 1]
    return _op.And(mask, _op.Or(near, blind))


def _onnx_cache_update(cache: Any, new: Any, index: Any) -> Any:
    return _op.TensorScatter(cache, new, index, axis=2, mode="linear")


def _onnx_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return _op.RMSNormalization(x, weight, axis=-1, epsilon=eps, stash_type=1)


def _onnx_rotary(x: Any, cos: Any, sin: Any) -> Any:
    rotated, width = 2 * cos.shape[-1], x.shape[-1]
    return _op.RotaryEmbedding(x, cos, sin, rotary_embedding_dim=0 if rotated == width else rotated)


def _onnx_rotary_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return _op.RotaryEmbedding(x, cos, sin, interleaved=1)


def _onnx_linear(x: Any, weight: Any, bias: Any) -> Any:
    product = _op.MatMul(x, _op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else _op.Add(product, bias)


def _onnx_gather_rows(h: Any, index: Any) -> Any:
    return _op.GatherND(h, _op.Unsqueeze(index, [-1]), batch_dims=1)


def _onnx_to_dtype(x: Any, dtype: int | None = None, *_: Any, **__: Any) -> Any:
    """Also for a move to another device, which says no dtype, or the one that is there."""
    if dtype is None:
        return _op.Identity(x)
    return _op.Identity(x) if x.dtype == dtype else _op.Cast(x, to=dtype)


TRANSLATION: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.eagle_export.attention.default: _onnx_attention,
    torch.ops.eagle_export.attention_with_sinks.default: _onnx_attention_with_sinks,
    torch.ops.eagle_export.narrow_mask.default: _onnx_narrow_mask,
    torch.ops.eagle_export.cache_update.default: _onnx_cache_update,
    torch.ops.eagle_export.rms_norm.default: _onnx_rms_norm,
    torch.ops.eagle_export.rotary.default: _onnx_rotary,
    torch.ops.eagle_export.rotary_pairs.default: _onnx_rotary_pairs,
    torch.ops.eagle_export.linear.default: _onnx_linear,
    torch.ops.eagle_export.gather_rows.default: _onnx_gather_rows,
    torch.ops.aten.to.dtype: _onnx_to_dtype,  # the only common operators that the exporter does not know
    torch.ops.aten.to.dtype_layout: _onnx_to_dtype,
}
