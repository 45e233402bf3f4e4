"""Llama 4's attention: rotation of neighbouring channels, layers without it, and their temperature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_export.models import native, ops

Positions = tuple[Tensor, Tensor, Tensor]


def rope(self: Any, x: Tensor, position_ids: Tensor) -> Positions:
    """In place of Llama4TextRotaryEmbedding.forward: cosine, sine [B, T, Dh/2] and the positions [B, T].

    Transformers takes a row's number for its position where it needs one without a rotation; in a tree that
    is another number.
    """
    cos, sin = native.angles(position_ids, self.inv_freq, self.attention_scaling, torch.float32)
    return cos, sin, position_ids


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Positions,
    attention_mask: Tensor,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """In place of Llama4TextAttention.forward: hidden_states [B, T, H] -> [B, T, H]."""
    cos, sin, positions = position_embeddings
    split = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        project(hidden_states).view(split).transpose(1, 2)  # [B, h, T, Dh]
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if self.use_rope:
        query, key = (ops.rotary(x.float(), cos, sin, interleaved=True).to(x.dtype) for x in (query, key))
        if hasattr(self, "qk_norm"):
            one = torch.ones(self.head_dim, dtype=torch.float32, device=query.device)
            query, key = (ops.rms_norm(x.float(), one, self.qk_norm.eps).to(x.dtype) for x in (query, key))
    elif self.attn_temperature_tuning:
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)  # [B, T]
        scale = torch.log(steps + 1.0) * self.attn_scale + 1.0  # as log1p, of whole numbers
        query = (query * scale[:, None, :, None]).to(query.dtype)
    key, value = cache.update(key, value, self.layer_idx)
    out, _none = native.attention(self, query, key, value, attention_mask, scaling=self.scaling)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None
