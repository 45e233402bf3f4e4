"""HeadSpec: everything that decides a head's two graphs, in one vocabulary for all checkpoint dialects.

Layer ids have ONE convention here: `feature_layers` are indices into the `hidden_states` that Transformers
returns. 0 is the embedding, i is the raw output of the i-th layer (no final norm), and `layers` of the target
is the output of its last layer *after* the final norm. `layers + 1` is that output *before* the final norm,
which Transformers does not return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]


class TargetSizes(Protocol):
    """What a head has to fit. `eagle_export.models.target.TargetDims` is one."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class HeadSpec:
    """One head: sizes, norms, RoPE, vocabularies. Names of its tensors follow SafeAILab's checkpoints.

    algorithm    "eagle3" (fuse + midlayer, own lm_head) or "eagle1" (fc in the draft, the target's lm_head;
                 EAGLE-2 has the same weights).
    layers       of the draft; those behind EAGLE-3's first one are plain ones.
    has_fc       EAGLE-3 only: features are fused by fc. Without it there is one feature, the target's last
                 hidden state after its final norm, which enters the draft as it is.
    norm_before_residual   the layer's residual is hidden_norm(hidden) instead of hidden.
    norm_output            the hidden fed back to the draft is the one after `norm` (EAGLE-3.1).
    norm_before_fc         one RMS norm over the concatenated features before fc.
    fc_norm                one RMS norm per feature before fc (EAGLE-3.1).
    norm_hidden_twice      hidden passes input_layernorm, then hidden_norm (so computes ModelOpt's trainer for
                           Hugging Face models, and no inference engine).
    """

    algorithm: str
    dialect: str
    layers: int
    hidden_size: int
    target_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    act: str
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_hidden_twice: bool = False
    has_fc: bool = True

    @property
    def has_fuse(self) -> bool:
        """Whether target features pass through a graph of their own before they reach the draft."""
        return self.algorithm == "eagle3" and self.has_fc

    @property
    def own_lm_head(self) -> bool:
        return self.algorithm == "eagle3"

    @property
    def feature_width(self) -> int:
        """Width of the concatenated target features, n * H."""
        return len(self.feature_layers) * self.target_hidden_size


Dialect = Callable[[Config, Tensors, TargetSizes], tuple[HeadSpec, Tensors]]


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """The three layers that EAGLE-3 taps when a checkpoint names none: inputs of layers 2, L//2, L-3."""
    return (2, layers // 2, layers - 3)


def raw_last(layers: int) -> int:
    """The id of the last layer's output in front of the target's final norm."""
    return layers + 1


def expected_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Every weight that a head of this spec has, by name, with its shape (vocabulary maps not included)."""
    width = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.vocab_size, width)
    if spec.algorithm == "eagle1":
        shapes["fc.weight"] = (width, 2 * width)
        for i in range(spec.layers):
            norms = ["post_attention_layernorm"]
            if i > 0:  # EAGLE-1 drops the norm in front of its first layer's attention
                norms.append("input_layernorm")
            shapes |= _layer_shapes(spec, f"layers.{i}.", width, norms)
    else:
        shapes |= _fuse_shapes(spec)
        norms = ["input_layernorm", "post_attention_layernorm"]
        shapes |= _layer_shapes(spec, "midlayer.", 2 * width, [*norms, "hidden_norm"])
        for i in range(1, spec.layers):
            shapes |= _layer_shapes(spec, f"layers.{i}.", width, norms)
        shapes["norm.weight"] = (width,)
        shapes["lm_head.weight"] = (spec.draft_vocab_size, width)
    if spec.fc_bias:
        shapes["fc.bias"] = (width,)
    return shapes


def _fuse_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.has_fc:
        shapes["fc.weight"] = (spec.hidden_size, spec.feature_width)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (spec.feature_width,)
    if spec.fc_norm:
        for i in range(len(spec.feature_layers)):
            shapes[f"fc_norm.{i}.weight"] = (spec.target_hidden_size,)
    return shapes


def _layer_shapes(
    spec: HeadSpec, prefix: str, attention_in: int, norms: list[str]
) -> dict[str, tuple[int, ...]]:
    width, inner = spec.hidden_size, spec.intermediate_size
    rows = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.o_proj.weight": (width, spec.heads * spec.head_dim),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    for key, heads in rows.items():
        shapes[f"self_attn.{key}_proj.weight"] = (heads * spec.head_dim, attention_in)
        if spec.qkv_bias:
            shapes[f"self_attn.{key}_proj.bias"] = (heads * spec.head_dim,)
    if spec.o_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    if spec.qk_norm:
        shapes |= {f"self_attn.{key}_norm.weight": (spec.head_dim,) for key in ("q", "k")}
    shapes |= {f"{norm}.weight": (width,) for norm in norms}
    return {prefix + name: shape for name, shape in shapes.items()}
