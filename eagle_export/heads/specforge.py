"""SpecForge checkpoints (`LlamaForCausalLMEagle3`): SafeAILab's tensors, plus norm flags and layer ids.

The same layout is written by several trainers; vLLM and SGLang read its flags as done here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle_export.heads import safeai
from eagle_export.heads.spec import Config, HeadSpec, TargetSizes, Tensors
from eagle_run.errors import EagleError

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
READ = safeai.READ | {*FLAGS, IDS, "eagle_config"}
HARMLESS = safeai.HARMLESS | {"num_aux_hidden_states", "target_model_type", "ttt_length", "ttt_steps"}
NESTED = frozenset({*FLAGS, IDS, "use_aux_hidden_state", "use_input_layernorm_in_first_layer"})


def read(config: Config, tensors: Tensors, target: TargetSizes) -> tuple[HeadSpec, Tensors]:
    """Read a SpecForge head. The tensors' names are already the canonical ones.

    Flags may stand at the top level or inside `eagle_config`. `norm_output` means what EAGLE-3.1, vLLM and
    SGLang mean: the draft is fed its own output after `norm`. (A SpecForge from before its pull request 879
    wrote `norm_output: true` into plain EAGLE-3 heads; such a file must be corrected by hand, nothing in it
    tells the two apart.)
    """
    safeai.refuse_unknown(config, READ | HARMLESS)
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise EagleError("config.json of the head: eagle_config must be an object")
    safeai.refuse_unknown(nested, NESTED)
    for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer"):
        if nested.get(key, True) is not True:
            raise EagleError(
                f"config.json of the head: eagle_config.{key}: {nested[key]!r} is not supported",
                hint="only EAGLE-3 heads with the usual fused features and norms can be exported",
            )
    flags = {flag: bool(nested.get(flag, config.get(flag))) for flag in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise EagleError(
            "config.json of the head sets both norm_before_fc and fc_norm; a head has one of them"
        )
    changes: dict[str, Any] = dict(flags)
    ids = feature_layers(config, nested)
    if ids is not None:
        changes["feature_layers"] = ids
    return replace(safeai.base_spec(config, tensors, target, dialect="specforge"), **changes), tensors


def feature_layers(config: Config, nested: dict[str, Any]) -> tuple[int, ...] | None:
    """Layer ids in `hidden_states` numbering, or None when config.json names none.

    The one rule: a top-level list (vLLM's place) is already in that numbering. A list inside `eagle_config`
    numbers layer *outputs* (0 = output of the first layer) if its smallest id is 0 or 1, as SpecForge writes
    it, and gets +1; a nested list that starts at 2 or above is taken as it is, since heads in the other
    numbering put theirs there too and nobody taps the embeddings (SGLang's rule, its pull request 25454).
    `load_head(..., layer_ids=...)` overrides it.
    """
    top, inner = config.get(IDS), nested.get(IDS)
    ids = top if top is not None else inner
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise EagleError(f"config.json of the head: {IDS} must be a list of layer numbers, found {ids!r}")
    shift = 1 if top is None and min(ids) < 2 else 0
    return tuple(i + shift for i in ids)
