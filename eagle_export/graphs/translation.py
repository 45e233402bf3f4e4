"""Which standard ONNX operator a traced graph gets for each operator of `ops`.

The arguments of the functions are onnx_ir values; `_op` records nodes into the graph being built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.values import Opset

from eagle_export.graphs import ops

_op = Opset("", ops.OPSET)
_ONNX_FLOAT = 1  # onnx.TensorProto.FLOAT


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
