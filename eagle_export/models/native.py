"""The operators of `graphs.ops` in place of those that Transformers writes out: norms, rotations, products.

Each function here takes the place of a method or function in the module that defines a family's classes, and
so has its signature. On a CPU the dozen small operators behind each of them cost a third of a decoding step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle_export.models import ops
from eagle_run.errors import EagleError

ATTENTION = "eagle_export"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; `s_aux` [Hq] are attention sinks."""
    if s_aux is None:
        out = ops.attention(query, key, value, attention_mask, scaling)  # [B, Hq, T, Dh]
    else:
        out = ops.attention_with_sinks(query, key, value, attention_mask, sinks=s_aux, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)


def linear(self: nn.Linear, x: Tensor) -> Tensor:
    return ops.linear(x, self.weight, self.bias)


def no_dropout(self: nn.Dropout, x: Tensor) -> Tensor:
    """Which only training has, but a trace would keep as a node."""
    return x


def norm(self: Any, hidden_states: Tensor) -> Tensor:
    return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def norm_eps(self: Any, x: Tensor) -> Tensor:
    """Llama 4 names its epsilon otherwise."""
    return ops.rms_norm(x, self.weight, self.eps)


def norm_wide(self: Any, hidden_states: Tensor) -> Tensor:
    """gpt-oss multiplies with the weight (which may be float32 in a 16-bit model) before it rounds."""
    wide = ops.rms_norm(hidden_states.float(), self.weight.float(), self.variance_epsilon)
    return wide.to(hidden_states.dtype)


def norm_one_plus(self: Any, x: Tensor) -> Tensor:
    """Gemma's weights are what is added to 1, in float32."""
    return ops.rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


def rope(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    return angles(position_ids, self.inv_freq, self.attention_scaling, x.dtype)


def rope_by_type(self: Any, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
    inv_freq = getattr(self, f"{layer_type}_inv_freq")
    return angles(position_ids, inv_freq, getattr(self, f"{layer_type}_attention_scaling"), x.dtype)


def angles(position_ids: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, T, R/2]: half of what Transformers returns, as operators want each once."""
    angle = position_ids[..., None].float() * inv_freq.float()  # [B, T, R/2]
    cos, sin = angle.cos(), angle.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)


@contextmanager
def replaced(model: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """While this lasts, `model`'s attention and products are those of `graphs.ops`, and so is what is named.

    replacements: "Class.method" or "function" in the module that defines the model's class -> what stands in
    for it. Raises EagleError for a name that is not there. Everything is put back at the end, also after an
    error.
    """
    module = sys.modules[type(model).__module__]
    config: Any = model.config
    new: list[tuple[Any, str, Any]] = [
        (nn.Linear, "forward", linear),
        (nn.Dropout, "forward", no_dropout),
        (config, "_attn_implementation", ATTENTION),
    ]
    for name, function in replacements.items():
        *owners, key = name.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        if not hasattr(owner, key):
            raise EagleError(
                f"{module.__name__} has no {name}, which the exporter replaces",
                hint="install the version of transformers that this package pins",
            )
        new.append((owner, key, function))
    before = [getattr(owner, key) for owner, key, _ in new]
    try:
        for owner, key, function in new:
            setattr(owner, key, function)
        yield
    finally:
        for (owner, key, _), old in zip(new, before, strict=True):
            setattr(owner, key, old)
