"""Which dialect a head's checkpoint is written in, and by name what none of the readers can read."""

from __future__ import annotations

from collections.abc import Iterable

from eagle_export.heads import modelopt, names, safeai, specforge, speculators
from eagle_export.heads.spec import Config, Dialect
from eagle_run.errors import EagleError

DIALECTS: dict[str, Dialect] = {
    "safeai": safeai.read,
    "specforge": specforge.read,
    "modelopt": modelopt.read,
    "speculators": speculators.read,
}

# What a part of a tensor's name gives away, in the order of asking.
_OTHER_KINDS = {
    "kv_a_proj_with_mqa": "an EAGLE head with latent attention (MLA)",
    "kv_b_proj": "an EAGLE head with latent attention (MLA)",
    ".experts.": "an EAGLE head with experts (MoE)",
    "medusa": "a Medusa head",
    "mask_hidden": "a P-EAGLE head, which drafts several tokens in one forward",
    "parallel_draft_heads": "an EAGLE head that drafts several tokens in one forward",
    "eh_proj": "a multi-token-prediction (MTP) module",
    "markov_": "a DSpark head",
    "prefix_gru": "a Domino head",
    "lora_": "a LoRA adapter",
}


def detect_dialect(config: Config, tensor_names: Iterable[str]) -> str:
    """Which reader a checkpoint needs: a key of DIALECTS. `tensor_names` are as `names.canonical` has them.

    Raises EagleError for what none of them reads.
    """
    tensors = set(tensor_names)
    _refuse_other_kinds(config, tensors)
    if any(config.get(key) for key in speculators.KEYS):
        return "speculators"
    if names.numbers_its_first_layer(tensors):
        return "modelopt"
    if names.is_eagle3(tensors):
        architectures = config.get("architectures")
        named = architectures if isinstance(architectures, list) else []
        flagged = any(config.get(key) for key in (*specforge.FLAGS, specforge.IDS, "eagle_config"))
        return "specforge" if flagged or any(str(a).endswith("LMEagle3") for a in named) else "safeai"
    if any(name.startswith("layers.0.") for name in tensors) and "fc.weight" in tensors:
        return "safeai"
    found = ", ".join(sorted(tensors)[:4]) or "none"
    raise EagleError(
        f"this is not an EAGLE head: neither midlayer.* (EAGLE-3) nor fc.weight and layers.0.* (EAGLE-1) "
        f"among its {len(tensors)} tensors (found {found}{', ...' if len(tensors) > 4 else ''})",
        hint="give the folder of a head, not of a target",
        parameters=["head"],
    )


def _refuse_other_kinds(config: Config, tensors: set[str]) -> None:
    kind = next((kind for part, kind in _OTHER_KINDS.items() if any(part in name for name in tensors)), None)
    if config.get("dflash_config") or config.get("block_size"):
        kind = kind or "a DFlash head"
    if kind is not None:
        raise EagleError(f"this is {kind}, which is not supported", hint="use a plain EAGLE-3 head")
    if config.get("quantization_config"):
        raise EagleError(
            "config.json of the head has quantization_config: quantised heads are not read",
            hint="use the checkpoint that is not quantised; a build in fp8 quantises on export",
        )
