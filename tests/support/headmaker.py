"""Writes tiny random head checkpoints in the layouts of the public ones, with the target parts they borrow.

Names and shapes are written down here a second time, from the checkpoints' own conventions: nothing of the
readers under test is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from support.dialects import as_dialect

VOCAB, DRAFT_VOCAB, LAYERS = 61, 23, 12
WIDTH, INNER, HEADS, KV_HEADS = 32, 48, 4, 2


@dataclass(frozen=True)
class Target:
    """The sizes of a target that a head has to fit."""

    layers: int = LAYERS
    hidden_size: int = WIDTH
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = WIDTH // HEADS
    vocab_size: int = VOCAB
    max_positions: int = 128


@dataclass(frozen=True)
class Head:
    """A checkpoint before it is written: config.json, tensors, and the target's parts that it may borrow.

    Config and tensors are in the canonical names whatever the `dialect`, which `write` turns them into.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Target
    embedding: Tensor  # the target's, [V, H]
    lm_head: Tensor  # the target's, [V, H]
    dialect: str = ""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        config, tensors = as_dialect(self.dialect, self.config, self.tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder


@dataclass(frozen=True)
class Recipe:
    """What a head is made of; the defaults make a plain SafeAILab EAGLE-3 head with a reduced vocabulary."""

    eagle1: bool = False
    layers: int = 1
    target_hidden: int = WIDTH
    head_dim: int = WIDTH // HEADS
    draft_vocab: int = DRAFT_VOCAB
    own_embedding: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    features: int = 3
    dialect: str = ""
    ordered: bool = True  # the draft vocabulary, by target id
    config: dict[str, Any] = field(default_factory=dict)


def make_head(recipe: Recipe, seed: int = 0) -> Head:
    """A random head: weights of a size at which every part of it shows in the output."""
    draw = _Draw(seed)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "torch_dtype": "float32",
    }
    tensors: dict[str, Tensor] = {}
    if recipe.own_embedding:
        tensors["embed_tokens.weight"] = draw(VOCAB, WIDTH, scale=0.5)
    if recipe.eagle1:
        tensors["fc.weight"] = draw(WIDTH, 2 * WIDTH)
        for i in range(recipe.layers):
            tensors |= _layer(recipe, draw, f"layers.{i}.", WIDTH)
            if i > 0:
                tensors[f"layers.{i}.input_layernorm.weight"] = draw.norm(WIDTH)
        config["bias"] = recipe.fc_bias
    else:
        tensors |= _eagle3(recipe, draw, recipe.config)
        config["draft_vocab_size"] = recipe.draft_vocab
    if recipe.fc_bias:
        tensors["fc.bias"] = draw(WIDTH)
    target = Target(hidden_size=recipe.target_hidden)
    embedding, lm_head = (draw(VOCAB, recipe.target_hidden, scale=0.5) for _ in range(2))
    return Head(config | recipe.config, tensors, target, embedding, lm_head, recipe.dialect)


def _eagle3(recipe: Recipe, draw: _Draw, config: dict[str, Any]) -> dict[str, Tensor]:
    flags = config | config.get("eagle_config", {})
    features = recipe.features * recipe.target_hidden
    tensors = {
        "fc.weight": draw(WIDTH, features),
        "midlayer.input_layernorm.weight": draw.norm(WIDTH),
        "midlayer.hidden_norm.weight": draw.norm(WIDTH),
        "norm.weight": draw.norm(WIDTH),
        "lm_head.weight": draw(recipe.draft_vocab, WIDTH),
    }
    if not flags.get("use_aux_hidden_state", True):
        del tensors["fc.weight"]
    tensors |= _layer(recipe, draw, "midlayer.", 2 * WIDTH)
    for i in range(1, recipe.layers):
        tensors |= _layer(recipe, draw, f"layers.{i}.", WIDTH)
        tensors[f"layers.{i}.input_layernorm.weight"] = draw.norm(WIDTH)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = draw.norm(features)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": draw.norm(recipe.target_hidden) for i in range(recipe.features)}
    if recipe.draft_vocab < VOCAB:
        ids = draw.subset(VOCAB, recipe.draft_vocab, ordered=recipe.ordered)
        tensors["d2t"] = ids - torch.arange(recipe.draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def _layer(recipe: Recipe, draw: _Draw, prefix: str, attention_in: int) -> dict[str, Tensor]:
    q, kv = HEADS * recipe.head_dim, KV_HEADS * recipe.head_dim
    tensors = {
        "self_attn.q_proj.weight": draw(q, attention_in),
        "self_attn.k_proj.weight": draw(kv, attention_in),
        "self_attn.v_proj.weight": draw(kv, attention_in),
        "self_attn.o_proj.weight": draw(WIDTH, q),
        "mlp.gate_proj.weight": draw(INNER, WIDTH),
        "mlp.up_proj.weight": draw(INNER, WIDTH),
        "mlp.down_proj.weight": draw(WIDTH, INNER),
        "post_attention_layernorm.weight": draw.norm(WIDTH),
    }
    if recipe.qkv_bias:
        tensors |= {
            f"self_attn.{k}_proj.bias": draw(n, scale=0.5) for k, n in (("q", q), ("k", kv), ("v", kv))
        }
    if recipe.o_bias:
        tensors["self_attn.o_proj.bias"] = draw(WIDTH, scale=0.5)
    if recipe.qk_norm:
        tensors |= {f"self_attn.{key}_norm.weight": draw.norm(recipe.head_dim) for key in "qk"}
    return {prefix + name: tensor for name, tensor in tensors.items()}


class _Draw:
    """Seeded random weights; matrices keep the size of what goes through them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float | None = None) -> Tensor:
        scale = 1.5 * shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(*shape, generator=self.generator) * scale

    def norm(self, width: int) -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=self.generator)

    def subset(self, size: int, count: int, *, ordered: bool) -> Tensor:
        ids = torch.randperm(size, generator=self.generator)[:count]
        return ids.sort().values if ordered else ids


RECIPES: dict[str, Recipe] = {
    "eagle3-safeai": Recipe(),
    "eagle3-own-embedding": Recipe(
        target_hidden=40, head_dim=12, own_embedding=True, config={"target_hidden_size": 40, "head_dim": 12}
    ),
    "eagle3-full-vocab": Recipe(draft_vocab=VOCAB, config={"rope_theta": 500000.0}),
    "eagle3-specforge": Recipe(
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
            "fc_norm": True,
            "norm_output": True,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }
    ),
    "eagle3-specforge-norms": Recipe(
        features=2,
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_aux_hidden_state_layer_ids": [3, 7],
            "norm_before_fc": True,
            "norm_before_residual": True,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ),
    "eagle3-qwen3": Recipe(qk_norm=True, qkv_bias=True, o_bias=True, config={"attention_bias": True}),
    "eagle3-modelopt": Recipe(
        dialect="modelopt",
        ordered=False,
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, "rope_scaling": None},
    ),
    "eagle3-modelopt-last": Recipe(
        dialect="modelopt",
        draft_vocab=VOCAB,
        config={
            "eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
            "rope_scaling": None,
        },
    ),
    "eagle3-modelopt-deep": Recipe(
        dialect="modelopt", layers=3, config={"rope_scaling": None, "num_hidden_layers": 3}
    ),
    "eagle3-speculators": Recipe(
        dialect="speculators",
        own_embedding=True,
        config={
            "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
            "norm_before_residual": True,
            "norm_before_fc": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "eagle3-speculators-3.1": Recipe(
        dialect="speculators",
        layers=2,
        features=5,
        qk_norm=True,
        draft_vocab=VOCAB,
        config={
            "model_type": "qwen3",
            "eagle_aux_hidden_state_layer_ids": [1, 3, 6, 8, 10],
            "fc_norm": True,
            "norm_output": True,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "eagle3-vllm": Recipe(dialect="vllm"),
    "eagle3-norms-twice": Recipe(config={"norm_hidden_twice": True}),
    "eagle1-speculators": Recipe(
        eagle1=True, fc_bias=True, dialect="speculators-eagle1", config={"rope_theta": 500000.0}
    ),
    "eagle1-bias": Recipe(eagle1=True, fc_bias=True, own_embedding=True),
    "eagle1-no-bias": Recipe(eagle1=True, layers=2, config={"num_hidden_layers": 2, "rope_theta": 500000.0}),
    "eagle1-qwen2": Recipe(eagle1=True, qkv_bias=True, config={"qkv_bias": True, "rope_theta": 1000000.0}),
}
