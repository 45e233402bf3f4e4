"""Checkpoints of vLLM's speculators: the draft's layer in `transformer_layer_config`, the rest beside it.

Read from speculators 0.9.0 (`speculators/models/eagle3`) and, for EAGLE-1, from 0.1 to 0.3
(`speculators/models/eagle.py`). Layer ids number the inputs of layers, as `hidden_states` does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from eagle_export.heads import names, safeai, specforge
from eagle_export.heads.spec import Config, HeadSpec, TargetSizes, Tensors
from eagle_run.errors import EagleError

KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
_READ = frozenset({
    *KEYS, *specforge.FLAGS, specforge.IDS, "draft_vocab_size", "target_hidden_size", "fusion_bias",
    "layernorms", "transformer_layer_architecture",
})  # fmt: skip
_HARMLESS = safeai.HARMLESS | {
    "base_model_ep_plan", "base_model_pp_plan", "base_model_tp_plan", "embed_requires_grad",
    "has_no_defaults_at_init", "speculators_version", "chunk_size_feed_forward", "problem_type",
}  # fmt: skip
# What the layer's config says beside a Llama's; it is the target's, or made from it.
_LAYER_HARMLESS = safeai.HARMLESS | {"chunk_size_feed_forward", "problem_type", "attn_implementation"}
_LAYERS = ("llama", "qwen3", "qwen2", "mistral")
_EAGLE1 = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_RENAMED = re.compile(r"^(fusion_fc|transformer)\.")


def read(config: Config, tensors: Tensors, target: TargetSizes) -> tuple[HeadSpec, Tensors]:
    """Read a speculators head: EAGLE-3, or EAGLE-1 without extra norms."""
    kind = algorithm(config)
    if kind not in ("eagle", "eagle3"):
        raise EagleError(
            f"this is a {kind!r} speculator; only eagle3 and eagle can be exported",
            hint="use an EAGLE head of this target",
        )
    layer = _layer_config(config)
    safeai.refuse_unknown(config, _READ | _HARMLESS)
    return (_read_eagle1 if kind == "eagle" else _read_eagle3)(config, layer, tensors, target)


def algorithm(config: Config) -> str:
    """What the speculator is, as speculators calls it."""
    inner = config.get("speculators_config") or {}
    if not isinstance(inner, dict):
        raise EagleError(
            f"config.json of the head: speculators_config must be an object, found {inner!r}",
            hint=safeai.CORRECT,
        )
    return str(config.get("speculators_model_type") or inner.get("algorithm") or "nameless")


def _layer_config(config: Config) -> dict[str, Any]:
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise EagleError(
            "config.json of the head: transformer_layer_config must be an object, found "
            f"{type(layer).__name__ if layer is not None else 'nothing'}",
            hint="download the head again",
        )
    safeai.refuse_unknown(layer, safeai.READ | _LAYER_HARMLESS)
    kind = layer.get("model_type", "llama")
    if kind not in _LAYERS:
        raise EagleError(
            f"config.json of the head: transformer_layer_config is of model_type {kind!r}; expected "
            f"{', '.join(_LAYERS)}",
            hint="a draft layer of another family is another graph",
        )
    return layer


def _read_eagle3(
    config: Config, layer: dict[str, Any], tensors: Tensors, target: TargetSizes
) -> tuple[HeadSpec, Tensors]:
    tensors = names.with_midlayer(tensors)
    flat = {**layer, **{key: config.get(key) for key in ("draft_vocab_size", "target_hidden_size")}}
    flags = {flag: specforge.switch(config, flag) for flag in specforge.FLAGS}
    specforge.refuse_both_norms(flags)
    changes: dict[str, Any] = dict(flags)
    if (ids := specforge.feature_layers(config, {})) is not None:
        changes["feature_layers"] = ids
    return replace(safeai.base_spec(flat, tensors, target, dialect="speculators"), **changes), tensors


def _read_eagle1(
    config: Config, layer: dict[str, Any], tensors: Tensors, target: TargetSizes
) -> tuple[HeadSpec, Tensors]:
    if specforge.switch(config, "layernorms"):
        raise EagleError(
            "config.json of the head: layernorms: true: EAGLE-1 with norms behind the embedding and in front "
            "of lm_head is not supported",
            hint="use an EAGLE-3 head of this target",
        )
    kind = config.get("transformer_layer_architecture") or "LlamaDecoderLayer"
    if kind != "LlamaDecoderLayer":
        raise EagleError(
            f"config.json of the head: a draft of {kind!r} is not supported, expected LlamaDecoderLayer",
            hint="use an EAGLE head of this target whose draft is a Llama layer",
        )
    renamed = {_RENAMED.sub(lambda found: _EAGLE1[found[0]], name): t for name, t in tensors.items()}
    return safeai.base_spec(layer, renamed, target, dialect="speculators"), renamed
