"""Writes a head as `load_head` reads it: SafeAILab's and SpecForge's config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_export.files import whole_file
from eagle_export.heads.spec import HeadSpec, default_feature_layers, expected_shapes
from eagle_export.heads.specforge import FLAGS, IDS
from eagle_run.dtypes import dtype_of
from eagle_run.errors import EagleError


def write_head(
    folder: Path,
    spec: HeadSpec,
    tensors: Mapping[str, Tensor],
    draft_to_target: Tensor | None,
    *,
    target_layers: int,
    dtype: torch.dtype = torch.float16,
    special: Mapping[str, int] | None = None,
) -> None:
    """Puts config.json and model.safetensors into `folder`; each appears whole or not at all.

    tensors: exactly those of `expected_shapes(spec)`. draft_to_target int64 [Vd]: target ids, for EAGLE-3.
    special: bos_token_id and the like, for other readers. Raises EagleError for tensors that do not fit the
    spec or that `dtype` cannot hold, and where the folder cannot be written.
    """
    from safetensors.torch import save_file

    shapes = expected_shapes(spec)
    own_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if own_shapes != shapes:
        names = own_shapes.keys() | shapes.keys()
        wrong = sorted(name for name in names if own_shapes.get(name) != shapes.get(name))
        first = wrong[0]
        raise EagleError(
            f"the head's tensors do not fit its spec: {', '.join(wrong)} ({first}: found "
            f"{own_shapes.get(first, 'none')}, expected {shapes.get(first, 'none')})",
            hint="write exactly the tensors of heads.spec.expected_shapes(spec)",
        )
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    broken = sorted(name for name, tensor in stored.items() if not torch.isfinite(tensor).all())
    if broken:
        raise EagleError(
            f"{', '.join(broken)} of the head cannot be stored as {dtype_of(dtype).name}: values out of "
            "range or not numbers",
            hint="train with a lower learning rate",
            parameters=["lr"],
        )
    if spec.algorithm == "eagle3" and spec.draft_vocab_size < spec.vocab_size:
        assert draft_to_target is not None
        ids = draft_to_target.cpu().long()
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    config = head_config(spec, target_layers=target_layers, dtype=dtype, special=special)
    with whole_file(folder / "config.json") as text, whole_file(folder / "model.safetensors") as weights:
        save_file(stored, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def head_config(
    spec: HeadSpec,
    *,
    target_layers: int,
    dtype: torch.dtype = torch.float16,
    special: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The config.json of a head."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if spec.algorithm == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "hidden_act": spec.act,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_positions,
        "vocab_size": spec.vocab_size,
        **(special or {}),
        "torch_dtype": dtype_of(dtype).name,
        "tie_word_embeddings": False,
    }
    if spec.rope_scaling:
        config["rope_scaling"] = dict(spec.rope_scaling)
    if spec.qkv_bias:
        config["attention_bias"] = spec.o_bias
        config["qkv_bias"] = True
    if spec.algorithm == "eagle1":
        return config | {"bias": spec.fc_bias}
    config["draft_vocab_size"] = spec.draft_vocab_size
    if spec.target_hidden_size != spec.hidden_size:
        config["target_hidden_size"] = spec.target_hidden_size
    config |= {flag: True for flag in FLAGS if getattr(spec, flag)}
    if not spec.has_fc:
        config["eagle_config"] = {"use_aux_hidden_state": False}
    elif spec.feature_layers == default_feature_layers(target_layers):
        # Numbers of layer outputs, where SpecForge and SGLang look for them.
        outputs = [layer - 1 for layer in spec.feature_layers]
        config["eagle_config"] = {IDS: outputs, "use_aux_hidden_state": True}
    else:  # in hidden_states' numbering, where vLLM looks for them
        config[IDS] = list(spec.feature_layers)
    return config
