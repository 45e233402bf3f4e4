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
# The last one is this project's own word, for heads that it trains further.
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "norm_hidden_twice")
READ = safeai.READ | {*FLAGS, IDS, "eagle_config"}
HARMLESS = safeai.HARMLESS | {"num_aux_hidden_states", "target_model_type", "ttt_length", "ttt_steps"}
# Keys of eagle_config with the only value that means the graph that is built here; null counts as absent.
_FIXED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}
NESTED = frozenset({*FLAGS, IDS, *_FIXED, "use_aux_hidden_state", "parallel_draft_step"})
_NESTED_HARMLESS = frozenset({"parallel_draft_heads_num_layers"})


def read(config: Config, tensors: Tensors, target: TargetSizes) -> tuple[HeadSpec, Tensors]:
    """Read a SpecForge head. The tensors' names are already the canonical ones.

    Flags may stand at the top level or inside `eagle_config`. `norm_output` means what EAGLE-3.1, vLLM and
    SGLang mean: the draft is fed its own output after `norm`. (SpecForge before its pull request 879 meant
    the norm in front of lm_head by it, which every head has; nothing in a file tells the two apart.
    The setting norm_output=false reads such a head, and `eagle-export verify` notices which one it is.)
    """
    return flagged(config, tensors, target, dialect="specforge"), tensors


def flagged(config: Config, tensors: Tensors, target: TargetSizes, *, dialect: str) -> HeadSpec:
    """The spec of a Llama config with flags and layer ids, at the top level or in `eagle_config`."""
    safeai.refuse_unknown(config, READ | HARMLESS)
    nested = _nested(config)
    flags = {flag: _flag(config, nested, flag) for flag in FLAGS}
    changes: dict[str, Any] = dict(flags)
    if not switch(nested, "use_aux_hidden_state", default=True):
        for flag in ("norm_before_fc", "fc_norm"):
            if flags[flag]:
                raise EagleError(
                    f"config.json of the head sets {flag}, a norm in front of fc, but use_aux_hidden_state: "
                    "false, which means that there is no fc",
                    hint=safeai.CORRECT,
                )
        # One feature, the last hidden state after the final norm; ids that stand there too mean nothing.
        changes |= {"has_fc": False, "feature_layers": (target.layers,)}
    else:
        ids = feature_layers(config, nested)
        if ids is not None:
            changes["feature_layers"] = ids
    refuse_both_norms(flags)
    return replace(safeai.base_spec(config, tensors, target, dialect=dialect), **changes)


def refuse_both_norms(flags: dict[str, bool]) -> None:
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise EagleError(
            "config.json of the head sets both norm_before_fc and fc_norm; a head has one of them",
            hint="remove the one whose norms (input_norm, fc_norm.0) are not among the weights",
        )


def switch(config: Config, key: str, *, default: bool = False) -> bool:
    """A flag of config.json; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise EagleError(
            f"config.json of the head: {key} must be true or false, found {value!r}", hint=safeai.CORRECT
        )
    return value


def _flag(config: Config, nested: Config, key: str) -> bool:
    """A flag that may stand in two places. Raises EagleError where they contradict each other."""
    values = [switch(section, key) for section in (config, nested) if section.get(key) is not None]
    if len(set(values)) > 1:
        raise EagleError(
            f"config.json of the head: {key} is {str(values[0]).lower()} at the top level and "
            f"{str(values[1]).lower()} in eagle_config",
            hint="remove the one that is wrong",
        )
    return any(values)


def feature_layers(config: Config, nested: Config) -> tuple[int, ...] | None:
    """Layer ids in `hidden_states` numbering, or None when config.json names none.

    The one rule: a top-level list (vLLM's place) is already in that numbering. A list inside `eagle_config`
    numbers layer *outputs* (0 = output of the first layer) if its smallest id is 0 or 1, as SpecForge and
    ModelOpt write it, and gets +1; a nested list that starts at 2 or above is taken as it is, since heads in
    the other numbering put theirs there too and nobody taps the embeddings (SGLang's rule, its pull request
    25454). `HeadSettings.layer_ids` overrides it. docs/heads.md has the table.
    """
    top, inner = config.get(IDS), nested.get(IDS)
    ids = top if top is not None else inner
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise EagleError(
            f"config.json of the head: {IDS} must be a list of layer numbers, found {ids!r}",
            hint=safeai.CORRECT,
        )
    shift = 1 if top is None and min(ids) < 2 else 0
    return tuple(i + shift for i in ids)


def _nested(config: Config) -> dict[str, Any]:
    """`eagle_config`, without anything in it that asks for another graph."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise EagleError(
            f"config.json of the head: eagle_config must be an object, found {nested!r}", hint=safeai.CORRECT
        )
    safeai.refuse_unknown(nested, NESTED | _NESTED_HARMLESS)
    for key, value in _FIXED.items():
        if switch(nested, key, default=value) is not value:
            raise EagleError(
                f"config.json of the head: eagle_config.{key}: {str(not value).lower()} is not supported",
                hint="only EAGLE-3 heads with the usual norms can be exported",
            )
    step = nested.get("parallel_draft_step")
    if step is not None and step != 1:
        raise EagleError(
            f"config.json of the head: eagle_config.parallel_draft_step: {step!r}: heads that draft several "
            "tokens in one forward are not supported",
            hint="use a head that drafts one token at a time",
        )
    return nested
