"""ModelOpt checkpoints: EAGLE-3 with its first layer called `layers.0`, and its flags in `eagle_config`.

Written by NVIDIA's Model Optimizer (`modelopt/torch/export/plugins/hf_spec_export.py`, and its Megatron
exporter). d2t is in order of frequency; only d2t says which target id a row of lm_head means.
"""

from __future__ import annotations

from eagle_export.heads import names, specforge
from eagle_export.heads.spec import Config, HeadSpec, TargetSizes, Tensors


def read(config: Config, tensors: Tensors, target: TargetSizes) -> tuple[HeadSpec, Tensors]:
    """Read a ModelOpt head: SpecForge's config.json, read by the same rules.

    `use_aux_hidden_state: false` (nvidia/gpt-oss-120b-Eagle3-v2) is a head without fc whose only feature is
    the target's last hidden state after the final norm; layer ids beside it mean nothing, as in vLLM. RoPE
    is as written, and what is written by default is a YaRN scaling for inference that the head was not
    trained with: the setting rope_scaling=none reads it as trained.
    """
    tensors = names.with_midlayer(tensors)
    return specforge.flagged(config, tensors, target, dialect="modelopt"), tensors
