"""What each head trainer writes: from canonical names and flags to a config.json and tensors of its own.

Restated from the trainers' formats, not from the readers under test. Keys are those of ModelOpt 0.47 and
speculators 0.9 (EAGLE-1: 0.3), and of the names inside vLLM.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
Written = tuple[dict[str, Any], dict[str, Tensor]]


def as_dialect(dialect: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Written:
    """config.json and tensors as `dialect` has them; "" is SafeAILab's and SpecForge's layout."""
    writers = {"modelopt": modelopt, "speculators": speculators, "speculators-eagle1": eagle1, "vllm": vllm}
    return writers[dialect](config, tensors) if dialect else (config, tensors)


def modelopt(config: dict[str, Any], tensors: dict[str, Tensor]) -> Written:
    """Its exporter fills a template; ids are of layer outputs; no t2d; a YaRN for inference."""
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.01,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "transformers_version": None,
        "use_cache": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": 10000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
        **config,
    }
    nested = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
        **config.get("eagle_config", {}),
    }
    named = {name: tensor for name, tensor in _numbered(tensors).items() if name != "t2d"}
    return {**written, "eagle_config": nested}, named


def speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> Written:
    """The layer's config inside, flags and ids (inputs of layers) outside, all of them always there."""
    outside = ("architectures", "draft_vocab_size", "target_hidden_size", IDS, *FLAGS)
    layer = {key: value for key, value in config.items() if key not in outside}
    written = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": "float32",
        IDS: config.get(IDS),
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        **{flag: bool(config.get(flag)) for flag in FLAGS},
        "speculators_config": _speculators_config("eagle3"),
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": config.get("target_hidden_size"),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": "5.19.0",
    }
    return written, _numbered(tensors)


def eagle1(config: dict[str, Any], tensors: dict[str, Tensor]) -> Written:
    layer = {key: value for key, value in config.items() if key not in ("architectures", "bias")}
    written = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "fusion_bias": "fc.bias" in tensors,
        "layernorms": False,
        "speculators_config": _speculators_config("eagle"),
        "speculators_model_type": "eagle",
        "speculators_version": "0.3.0",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer,
    }
    named = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
        for name, tensor in tensors.items()
    }
    return written, named


def vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> Written:
    """The names that vLLM's module has inside."""
    named = {"d2t": "draft_id_to_target_id", "lm_head.weight": "lm_head.weight"}
    return config, {
        named.get(name, f"model.{name}"): tensor
        for name, tensor in _numbered(tensors).items()
        if name != "t2d"
    }


def _numbered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _speculators_config(algorithm: str) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/verifier"},
    }
