"""The torch head: `Fuse` and `Draft`, traced by the exporter and trained by the trainer alike.

EAGLE-3 (arXiv 2503.01840, section 3.1): target features g = fc(cat[low, mid, high]) enter a single layer
beside the embedding of the next token; for tokens that the target has not seen yet, the layer's raw output
takes the place of g. EAGLE-1 (arXiv 2401.15077, section 3.1): fc joins the target's last feature and the
embedding in front of a plain layer, and the target's own lm_head reads the output.

Parameters are named as in SafeAILab's checkpoints, so a `state_dict` is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.heads.load import LoadedHead
from eagle_export.heads.spec import HeadSpec
from eagle_export.models import ops
from eagle_run.errors import EagleError

# (layer, q [B, Hq, T, Dh], k and v [B, Hkv, T, Dh], rotated) -> attended [B, Hq, T, Dh].
# The exporter passes attention over the cache, the trainer its own over the whole sequence.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cos and sin [B, T, Dh/2]


class RmsNorm(nn.Module):
    """RMS norm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Rope(nn.Module):
    """cos and sin of a head's own rotary embedding, with Transformers' frequencies for every scaling."""

    inv_freq: Tensor

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

        parameters = {"rope_type": "default", **spec.rope_scaling, "rope_theta": spec.rope_theta}
        with torch.device("cpu"):  # the frequencies are not in the checkpoint: real ones even on meta
            source: Any = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=spec.hidden_size,
                    num_attention_heads=spec.heads,
                    head_dim=spec.head_dim,
                    max_position_embeddings=spec.max_positions,
                    rope_parameters=parameters,
                )
            )
        self.register_buffer("inv_freq", source.inv_freq.float(), persistent=False)  # [Dh/2]
        self.scaling = float(source.attention_scaling)

    def forward(self, position_ids: Tensor) -> Rotation:
        """position_ids int64 [B, T] -> cos, sin float32 [B, T, Dh/2]."""
        angles = position_ids[:, :, None].float() * self.inv_freq  # [B, T, Dh/2]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scaling == 1.0 else (cos * self.scaling, sin * self.scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        exact = self.inv_freq  # module.half() must not round the frequencies
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


class Attention(nn.Module):
    """Projections around grouped-query attention; the attention itself is the caller's."""

    def __init__(self, spec: HeadSpec, width: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(width, spec.heads * spec.head_dim, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=spec.o_bias)
        self.q_norm = RmsNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width], cos and sin [B, T, Dh/2] -> rotated q [B, Hq, T, Dh], k and v [B, Hkv, T, Dh]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return ops.rotary(self.q_norm(q), cos, sin), ops.rotary(self.k_norm(k), cos, sin), v

    def out(self, attended: Tensor) -> Tensor:
        """attended [B, Hq, T, Dh] -> [B, T, Hd]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The gated feed-forward block of Llama."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)
        self.act = ACT2FN[spec.act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """What the layers of all heads have in common: everything after their first norms."""

    def __init__(self, spec: HeadSpec, attention_in: int) -> None:
        super().__init__()
        self.self_attn = Attention(spec, attention_in)
        self.mlp = Mlp(spec)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def finish(self, x: Tensor, residual: Tensor, rotation: Rotation, attend: Attend, index: int) -> Tensor:
        """x [B, T, attention_in], residual [B, T, Hd] -> [B, T, Hd]."""
        attended = attend(index, *self.self_attn.qkv(x, *rotation))
        hidden = residual + self.self_attn.out(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MidLayer(Layer):
    """EAGLE-3's layer: attention reads the normed embedding beside the normed hidden."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec, 2 * spec.hidden_size)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.norm_before_residual = spec.norm_before_residual
        self.norm_hidden_twice = spec.norm_hidden_twice

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        normed = self.hidden_norm(self.input_layernorm(hidden) if self.norm_hidden_twice else hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)  # [B, T, 2*Hd]
        return self.finish(x, normed if self.norm_before_residual else hidden, rotation, attend, 0)


class PlainLayer(Layer):
    """Llama's layer; the first one of EAGLE-1 without its input norm."""

    def __init__(self, spec: HeadSpec, index: int) -> None:
        super().__init__(spec, spec.hidden_size)
        self.index = index
        if index > 0:
            self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        x = self.input_layernorm(hidden) if self.index > 0 else hidden
        return self.finish(x, hidden, rotation, attend, self.index)


class Fuse(nn.Module):
    """EAGLE-3's way from target features to the draft's hidden: fc and the norms in front of it."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.norm_before_fc:
            self.input_norm = RmsNorm(spec.feature_width, spec.rms_norm_eps)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(
                RmsNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in spec.feature_layers
            )
        self.fc = nn.Linear(spec.feature_width, spec.hidden_size, bias=spec.fc_bias)

    def forward(self, features: Tensor) -> Tensor:
        """features [B, T, n*H] -> hidden [B, T, Hd]."""
        if self.spec.norm_before_fc:
            features = self.input_norm(features)
        if self.spec.fc_norm:
            parts = features.split(self.spec.target_hidden_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)


class Draft(nn.Module):
    """The draft: embedding, layers and lm_head of a head, as one function over a KV cache."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, width)
        if spec.algorithm == "eagle3":
            self.midlayer = MidLayer(spec)
            self.layers = nn.ModuleDict(
                {str(index): PlainLayer(spec, index) for index in range(1, spec.layers)}
            )
            self.norm = RmsNorm(width, spec.rms_norm_eps)
        else:
            self.fc = nn.Linear(2 * width, width, bias=spec.fc_bias)
            self.layers = nn.ModuleDict({str(index): PlainLayer(spec, index) for index in range(spec.layers)})
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False)
        self.rope = Rope(spec)

    def forward(  # noqa: PLR0917  (the graph's inputs, in its order)
        self,
        input_ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        write_index: Tensor,
        logits_index: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        """One forward over T rows per sequence; a row pairs token x_{t+1} with the feature, or hidden, of t.

        input_ids int64 [B, T] (target vocabulary), hidden [B, T, Hd], position_ids int64 [B, T], tree_mask
        bool [B, 1, T, KV], write_index int64 [B], logits_index int64 [B, R], past = key and value of each
        layer in turn, [B, Hkv, S, Dh].

        Returns logits float32 [B, R, Vd] of the rows in logits_index, hidden_out [B, T, Hd] to feed back,
        then key and value of each layer; in eager mode those are the tensors of `past`, written in place.
        """
        caches = list(past)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = 2 * layer
            caches[at] = ops.cache_update(caches[at], k, write_index)
            caches[at + 1] = ops.cache_update(caches[at + 1], v, write_index)
            scale = self.spec.head_dim**-0.5
            return ops.attention(q, caches[at], caches[at + 1], tree_mask, scale)

        raw = self.run(input_ids, hidden, position_ids, attend)  # [B, T, Hd]
        rows = ops.gather_rows(raw, logits_index)  # [B, R, Hd]
        hidden_out = self.norm(raw) if self.spec.norm_output else raw
        return (self.logits(rows), hidden_out, *caches)

    def run(self, input_ids: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """The layers alone, over any attention: [B, T] ids, [B, T, Hd] hidden -> raw output [B, T, Hd]."""
        embedded = self.embed_tokens(input_ids).to(hidden.dtype)  # [B, T, Hd]
        rotation = self.rope(position_ids)
        if self.spec.algorithm == "eagle3":
            hidden = self.midlayer(embedded, hidden, rotation, attend)  # [B, T, Hd]
        else:
            hidden = self.fc(torch.cat((embedded, hidden), dim=-1))  # [B, T, Hd]
        for layer in self.layers.values():
            hidden = layer(hidden, rotation, attend)
        return hidden

    def logits(self, raw: Tensor) -> Tensor:
        """Raw layer output [..., Hd] -> float32 logits [..., Vd]."""
        rows = self.norm(raw) if self.spec.algorithm == "eagle3" else raw
        return self.lm_head(rows).float()


def build_head(
    loaded: LoadedHead,
    target_embedding: Tensor,
    target_lm_head: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Fuse | None, Draft]:
    """The modules of a loaded head, in eval mode, weights in `dtype`.

    target_embedding and target_lm_head [V, H]: used where the head has none of its own; then they are shared,
    not copied (if their dtype is `dtype` already), and frozen. Raises EagleError when they do not fit.
    """
    spec, state = loaded.spec, dict(loaded.tensors)
    borrowed = {}
    if not spec.own_embedding:
        borrowed["embed_tokens.weight"] = target_embedding
    if not spec.own_lm_head:
        borrowed["lm_head.weight"] = target_lm_head
    for name, tensor in borrowed.items():
        if tuple(tensor.shape) != (spec.vocab_size, spec.hidden_size):
            raise EagleError(
                f"the target's {name} has shape {list(tensor.shape)}, the head expects "
                f"{[spec.vocab_size, spec.hidden_size]}",
                hint="a head works only with the target it was trained on",
            )
    state = {name: tensor.detach().to(dtype) for name, tensor in (state | borrowed).items()}
    with torch.device("meta"):
        fuse = Fuse(spec) if spec.has_fuse else None
        draft = Draft(spec)
    if fuse is not None:
        fuse.load_state_dict({name: state.pop(name) for name in fuse.state_dict()}, assign=True)
        fuse.eval()
    draft.load_state_dict(state, assign=True)
    for name in borrowed:
        draft.get_parameter(name).requires_grad_(False)
    return fuse, draft.eval()
