"""Which targets can be exported: one row a family, what is refused by name, and how far each layer sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from eagle_export.models import llama4, moe, native
from eagle_run.errors import EagleError

# Rotations whose frequencies do not depend on the length of the sequence.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
_SPANS = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}  # where a config says how far
Replacement = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """What the exporter has to know of a family of models that Transformers writes.

    `prefix` starts the names of its classes. Its norm and rotation are replaced by the functions given here,
    and so is every "Class.method" or function of its module in `more`; `rotary` names the function that
    applies a rotation to queries and keys. `masks`: whether its model's forward takes one mask for all
    layers, or one by layer type.
    """

    title: str
    prefix: str
    masks: Literal["one", "by type"] = "one"
    norm: Replacement = native.norm
    rope: Replacement = native.rope
    rotary: str | None = "apply_rotary_pos_emb"
    more: tuple[tuple[str, Replacement], ...] = ()

    def replacements(self) -> dict[str, Replacement]:
        """By name in the module that defines the family's classes."""
        functions = {
            f"{self.prefix}RMSNorm.forward": self.norm,
            f"{self.prefix}RotaryEmbedding.forward": self.rope,
            **dict(self.more),
        }
        return functions if self.rotary is None else {**functions, self.rotary: native.apply_rotary}


@dataclass(frozen=True)
class Span:
    """How far back a layer sees: `size` tokens ("window"), or to the start of its chunk of `size` tokens."""

    kind: Literal["window", "chunk"]
    size: int


FAMILIES: dict[str, Family] = {
    "gemma3_text": Family(
        "Gemma 3", "Gemma3", "by type", norm=native.norm_one_plus, rope=native.rope_by_type
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "GptOss",
        "by type",
        norm=native.norm_wide,
        more=(("GptOssMLP.forward", moe.gpt_oss),),
    ),
    "llama": Family("Llama", "Llama"),
    "llama4_text": Family(
        "Llama 4",
        "Llama4Text",
        "by type",
        norm=native.norm_eps,
        rope=llama4.rope,
        rotary=None,
        more=(("Llama4TextAttention.forward", llama4.attention), ("Llama4TextMoe.forward", moe.llama4)),
    ),
    "mistral": Family("Mistral", "Mistral"),
    "phi3": Family("Phi-3 and Phi-4", "Phi3"),
    "qwen2": Family("Qwen2", "Qwen2", "by type"),
    "qwen3": Family("Qwen3", "Qwen3", "by type"),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3Moe", more=(("Qwen3MoeSparseMoeBlock.forward", moe.qwen3_moe),)),
}
# Models that see images too, of which the language part is exported: the family of that part.
TEXT_PARTS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
# Names of its weights: what they start with in the checkpoint of the whole, and here; what is left out.
TEXT_KEYS = {r"^language_model\.": "", r"^model\.language_model\.": "model."}
NO_TEXT = ("vision_tower.", "vision_model.", "multi_modal_projector.", "model.vision_", "model.multi_modal_")

_STATE = "layers with a recurrent state (state space or linear attention): a tree of tokens cannot share one"
_MLA = "multi-head latent attention: its keys and values have other widths than the cache of the graphs"
_VISION = "images in its positions (M-RoPE), which the graphs do not have"
_CAPPED = "a cap on its attention scores (soft-capping), which compilers drop from Attention without a word"
_ALIBI = "ALiBi, a bias on attention scores by distance: the tree mask cannot say it"
_UNTESTED = "a mixture of experts that is not tested here; nobody is known to publish an EAGLE-3 head for it"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2"), _STATE
    ),
    **dict.fromkeys(
        ("minimax", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv"), _STATE
    ),
    **dict.fromkeys(("zamba", "zamba2", "kimi_linear", "qwen3_5_text", "qwen3_5_moe_text"), _STATE),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "kimi_k25", "minicpm3"),
        _MLA,
    ),
    **dict.fromkeys(("longcat_flash", "glm_moe_dsa"), _MLA),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"), _VISION),
    "gemma2": _CAPPED,
    "gemma3n": "an embedding for each layer, and layers that share keys and values",
    "gemma3n_text": "an embedding for each layer, and layers that share keys and values",
    "gemma4": "heads of more than one width, and layers that share keys and values",
    "gemma4_text": "heads of more than one width, and layers that share keys and values",
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        ("mixtral", "phimoe", "qwen2_moe", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2"), _UNTESTED
    ),
}
_HINT = "use a target of one of these families: " + ", ".join(family.title for family in FAMILIES.values())


def family_of(config: Any) -> Family:
    """The family of a config's model. Raises EagleError, with the reason where one is known."""
    kind = config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind in REFUSED:
        raise EagleError(f"target family {kind!r} is not supported: it has {REFUSED[kind]}", hint=_HINT)
    raise EagleError(
        f"target family {kind!r} is not supported, expected one of {', '.join(sorted(FAMILIES))}", hint=_HINT
    )


def text_part(config: Any) -> Any:
    """The config of the language part of a model that sees images too; any other config as it is."""
    return config.text_config if config.model_type in TEXT_PARTS else config


def expert_count(config: Any) -> int:
    """Experts of a layer; 0 for a model without."""
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


def layer_spans(config: Any) -> dict[str, Span | None]:
    """How far back the layers see by layer type; None for those that see everything.

    A family that takes one mask for all layers has one entry.
    """
    if family_of(config).masks == "one":
        window = getattr(config, "sliding_window", None)
        return {FULL: None} if window is None else {WINDOW: Span("window", window)}
    spans: dict[str, Span | None] = {}
    for kind in dict.fromkeys(config.layer_types):
        size = getattr(config, _SPANS[kind], None) if kind in _SPANS else None
        spans[kind] = None if size is None else Span("window" if kind == WINDOW else "chunk", size)
    return spans


def check_family(config: Any, max_seq_len: int) -> None:
    """Raise EagleError unless a model of this config is computed exactly by the target graph.

    The family must be one whose parity is tested, its layers must be of kinds that the graph knows, and the
    rotation must not depend on the length of the sequence.
    """
    family = family_of(config)
    _check_layer_types(config, family)
    if getattr(config, "use_bidirectional_attention", False):
        raise EagleError(
            f"{family.title} target with use_bidirectional_attention: it encodes text and decodes none",
            hint="use a target that generates text",
        )
    if getattr(config, "attn_logit_softcapping", None):  # which Transformers leaves out, and others do not
        raise EagleError(
            f"{family.title} target with attn_logit_softcapping: it has {_CAPPED}",
            hint="set it to null in the target's config.json if the model was trained without",
        )
    for rope in _ropes(config):
        _check_rope(config, family, rope, max_seq_len)
    if max_seq_len > config.max_position_embeddings:
        raise EagleError(
            f"max_seq_len is {max_seq_len}, but this target knows only "
            f"{config.max_position_embeddings} positions",
            hint=f"use {config.max_position_embeddings} or less",
            parameters=["max_seq_len"],
        )


def _check_layer_types(config: Any, family: Family) -> None:
    kinds, sizes = set(getattr(config, "layer_types", None) or ()), {**_SPANS, FULL: None}
    if other := sorted(kinds - set(sizes)):
        raise EagleError(
            f"{family.title} target with {', '.join(other)} layers, expected {', '.join(sorted(sizes))}",
            hint="use a target with attention in every layer",
        )
    for kind in sorted(kinds):
        if (size := sizes[kind]) is not None and getattr(config, size, None) is None:
            raise EagleError(
                f"{family.title} target with {kind} layers, but no {size}",
                hint="correct the target's config.json: its layer_types contradict the rest",
            )
    if family.masks == "one" and kinds and kinds != set(layer_spans(config)):
        raise EagleError(
            f"{family.title} target with layer_types {', '.join(sorted(kinds))}: in all layers of this "
            f"family Transformers computes {', '.join(layer_spans(config))}",
            hint="correct layer_types, sliding_window or model_type in the target's config.json",
        )


def rope_of(config: Any) -> dict[str, Any]:
    """The rotation of a config. Where it differs by layer type, that of the layers that see everything."""
    ropes = _ropes(config)
    return dict((getattr(config, "rope_parameters", None) or {}).get(FULL) or ropes[0])


def norm_weight(config: Any, weight: Any) -> Any:
    """What a norm of this model multiplies with, of what is stored as its weight: Gemma adds 1 to that."""
    return weight + 1.0 if family_of(config).norm is native.norm_one_plus else weight


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotation of a config, or those of its layer types."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _check_rope(config: Any, family: Family, rope: dict[str, Any], max_seq_len: int) -> None:
    kind = rope.get("rope_type", "default")
    if kind in STATIC_ROPE:
        return
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if kind == "longrope" and original is not None:
        if max_seq_len <= original:  # up to there only the factors of short sequences are used
            return
        raise EagleError(
            f"{family.title} target with 'longrope' scaling: beyond {original} tokens its frequencies "
            f"change, but a graph needs fixed ones, and max_seq_len is {max_seq_len}",
            hint=f"use {original} or less",
            parameters=["max_seq_len"],
        )
    raise EagleError(
        f"{family.title} target with {kind!r} rotary scaling: its frequencies change with the length "
        f"of the sequence, but a graph needs fixed ones; expected one of {', '.join(STATIC_ROPE)}",
        hint="set rope_parameters in the target's config.json to a fixed scaling, or use another target",
    )
