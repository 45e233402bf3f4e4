"""Tiny random targets of the families beyond plain decoders: windows, chunks, experts, sinks, no rotation.

Windows and chunks are a few tokens long, so that a prompt of a dozen and the trees behind it pass them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WINDOW, CHUNK = 5, 6
# The config of Phi-4-mini in small: a part of each head rotates, and factors change beyond 64 tokens.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}


def family_kinds(sizes: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """A maker of each kind of model; `sizes` are config keys that all families know."""
    layers = sizes["num_hidden_layers"]
    plain = {**sizes, "pad_token_id": None}
    experts = {"num_experts_per_tok": 2}
    return {
        "mistral-window": lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW)),
        "qwen2-window": lambda: Qwen2ForCausalLM(
            Qwen2Config(**sizes, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
        ),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**plain)),
        "phi3-mini": lambda: Phi3ForCausalLM(
            Phi3Config(
                **plain,
                rope_parameters=_LONGROPE,
                original_max_position_embeddings=64,
                sliding_window=WINDOW,
                tie_word_embeddings=True,
            )
        ),
        "qwen3-moe": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **sizes, **experts, num_experts=6, moe_intermediate_size=40, head_dim=24, mlp_only_layers=[1]
            )
        ),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sizes,
                head_dim=24,
                query_pre_attn_scalar=32,
                sliding_window=WINDOW,
                layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
            )
        ),
        "gpt-oss": lambda: GptOssForCausalLM(
            GptOssConfig(
                **plain,
                **experts,
                head_dim=16,
                num_local_experts=6,
                sliding_window=WINDOW,
                rope_parameters=_YARN,
            )
        ),
        "llama4": lambda: Llama4ForCausalLM(
            Llama4TextConfig(
                **plain,
                num_experts_per_tok=1,
                num_local_experts=4,
                intermediate_size_mlp=80,
                head_dim=16,
                no_rope_layers=[1, 0, 1],
                interleave_moe_layer_step=2,
                attention_chunk_size=CHUNK,
                floor_scale=4,
            )
        ),
    }
