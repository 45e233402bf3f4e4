"""Public heads by the shape of their config.json, as far as it is known, with sizes scaled down.

The known parts (flags, ids, RoPE, architecture, vocabularies, what is left out) are as their authors wrote
them; widths, vocabularies and the target's layers are small. What each must be read as stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.headmaker import DRAFT_VOCAB, HEADS, VOCAB, WIDTH, Recipe, Target, make_head

from eagle_export.heads.load import load_head
from eagle_export.heads.settings import HeadSettings
from eagle_export.heads.spec import default_feature_layers

IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_PLAIN = Recipe()
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"]}


@dataclass(frozen=True)
class Public:
    """The target's layers, how the head is made, and parts of the spec that it must give."""

    layers: int
    recipe: Recipe
    expected: dict[str, Any] = field(default_factory=dict)


def safeai(target_layers: int, recipe: Recipe = _PLAIN, **expected: Any) -> Public:
    usual = {
        "dialect": "safeai",
        "feature_layers": default_feature_layers(target_layers),
        "rope_theta": 10000.0,
    }
    return Public(target_layers, recipe, usual | expected)


def specforge(
    layers: int, ids: tuple[int, ...], config: dict[str, Any], recipe: Recipe = _PLAIN, **expected: Any
) -> Public:
    recipe = replace(recipe, config={**SPECFORGE, **recipe.config, **config})
    return Public(layers, recipe, {"dialect": "specforge", "feature_layers": ids} | expected)


def speculators(layers: int, ids: list[int] | None, config: dict[str, Any], **expected: Any) -> Public:
    config = {IDS: ids, **config}
    wanted = tuple(ids) if ids else (2, layers // 2, layers - 3)
    return Public(
        layers,
        Recipe(dialect="speculators", own_embedding=True, config=config),
        {"dialect": "speculators", "feature_layers": wanted, "own_embedding": True} | expected,
    )


# The draft is narrower than the target, and the width of its attention heads is not hidden / heads.
_WIDE = Recipe(
    target_hidden=40, head_dim=12, own_embedding=True, config={"target_hidden_size": 40, "head_dim": 12}
)
HEADS_KNOWN: dict[str, Public] = {
    "yuhuili/EAGLE3-Vicuna1.3-13B": safeai(40, Recipe(config={"num_hidden_layers": 40}), layers=1),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": safeai(32),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": safeai(
        80, _WIDE, target_hidden_size=40, hidden_size=WIDTH, own_embedding=True, head_dim=12
    ),
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": safeai(32),
    "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge": specforge(
        80, (2, 40, 77), {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, rope_theta=500000.0
    ),
    "lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1": specforge(
        48, (2, 24, 45), {"max_position_embeddings": 4096, "pad_token_id": 0}
    ),
    "nvidia/Llama-4-Maverick-17B-128E-Eagle3": Public(
        48,
        Recipe(
            dialect="modelopt",
            ordered=False,
            qkv_bias=True,
            config={"attention_bias": True, "rope_theta": 500000, "eagle_config": {IDS: [1, 23, 44]}},
        ),
        {"dialect": "modelopt", "feature_layers": (2, 24, 45), "qkv_bias": True, "rope_theta": 500000.0},
    ),
    "lmsys/Qwen3-235B-A22B-EAGLE3": specforge(
        94,
        (2, 47, 91),
        {
            "rope_theta": 1e6,
            "rope_scaling": None,
            "eagle_config": {IDS: [1, 46, 90], "use_aux_hidden_state": True},
        },
        rope_theta=1e6,
    ),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": specforge(
        36, (2, 18, 33), {"eagle_config": {IDS: [1, 17, 32]}, "head_dim": WIDTH // HEADS}
    ),
    "AngelSlim/Qwen3-8B_eagle3": Public(
        36,
        Recipe(
            config={
                "architectures": ["Eagle3LlamaForCausalLM"],
                "rope_theta": 1000000,
                "head_dim": WIDTH // HEADS,
            }
        ),
        {"dialect": "safeai", "feature_layers": (2, 18, 33), "rope_theta": 1e6},
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": speculators(
        36,
        [2, 18, 33],
        {"norm_before_residual": True, "rope_theta": 1000000},
        norm_before_residual=True,
        rope_theta=1e6,
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": speculators(
        32, None, {"norm_before_residual": True, "rope_scaling": LLAMA3, "rope_theta": 500000.0}
    ),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": speculators(
        24,
        [2, 12, 21],
        {"norm_before_residual": True, "norm_before_fc": True, "rope_theta": 10000.0},
        norm_before_residual=True,
        norm_before_fc=True,
    ),
    "nvidia/gpt-oss-120b-Eagle3-v2": Public(
        36,
        Recipe(
            dialect="modelopt",
            draft_vocab=VOCAB,
            config={"eagle_config": {"use_aux_hidden_state": False, IDS: [1, 17, 32]}},
        ),
        {"dialect": "modelopt", "feature_layers": (36,), "has_fc": False, "has_fuse": False},
    ),
    "nebius/EAGLE3-gpt-oss-20b": Public(
        24,
        Recipe(
            config={
                "architectures": ["LlamaForCausalLM"],
                "truncated_vocab_size": DRAFT_VOCAB,
                "rope_theta": 150000,
                "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "head_dim": WIDTH // HEADS,
            }
        ),
        {"dialect": "safeai", "feature_layers": (2, 12, 21), "rope_theta": 150000.0},
    ),
    "a SpecForge EAGLE-3.1 head of Qwen3-30B-A3B": specforge(
        48,
        (2, 24, 45),
        {"fc_norm": True, "norm_output": True, "max_window_layers": 48, "use_sliding_window": False},
        fc_norm=True,
        norm_output=True,
    ),
}


@pytest.mark.parametrize("name", sorted(HEADS_KNOWN))
def test_is_read(name: str, tmp_path: Path) -> None:
    public = HEADS_KNOWN[name]
    head = make_head(public.recipe)
    target = replace(head.target, layers=public.layers)
    spec = load_head(head.write(tmp_path), target).spec
    assert {key: getattr(spec, key) for key in public.expected} == public.expected


def test_last_layer_without_its_norm(tmp_path: Path) -> None:
    """nvidia/gpt-oss-120b-Eagle3-v3 reads 24, 30 and the raw output of layer 36 of 36."""
    config = {"eagle_config": {IDS: [24, 30, 36], "norm_before_fc": True}}
    head = make_head(Recipe(dialect="modelopt", config=config))
    spec = load_head(head.write(tmp_path), replace(head.target, layers=36)).spec
    assert (spec.feature_layers, spec.norm_before_fc) == ((24, 30, 37), True)


def test_settings_over_a_public_head(tmp_path: Path) -> None:
    head = make_head(HEADS_KNOWN["nebius/EAGLE3-gpt-oss-20b"].recipe)
    folder, target = head.write(tmp_path), Target(layers=24)
    assert load_head(folder, target).spec.rope_scaling["factor"] == 32.0
    said = HeadSettings(
        layer_ids=(3, 13, 22), rope_theta=10000.0, rope_scaling="none", norm_before_residual=True
    )
    loaded = load_head(folder, target, said)
    spec = loaded.spec
    assert (spec.feature_layers, spec.rope_theta, spec.rope_scaling) == ((3, 13, 22), 10000.0, {})
    assert (spec.norm_before_residual, loaded.settings) == (True, said)
