"""SafeAILab checkpoints: EAGLE-3 (`midlayer.*`) and EAGLE-1/2 (`layers.*`), the names everyone else adapts.

Read from the reference implementation, SafeAILab/EAGLE `eagle/model/cnets.py` (EAGLE-3) and `cnets1.py`
(EAGLE-1/2): a Llama layer whose config.json is Llama's, plus `bias`, `qkv_bias` and `target_hidden_size`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from eagle_export.heads.spec import Config, HeadSpec, TargetSizes, Tensors, default_feature_layers
from eagle_run.errors import EagleError

# Keys that say nothing about the computation, or that this reader takes from the tensors instead.
_HARMLESS = """
    _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map bos_token_id dtype
    eos_token_id id2label initializer_range is_encoder_decoder label2id max_window_layers model_type
    num_hidden_layers output_attentions output_hidden_states pad_token_id pretraining_tp return_dict
    tie_word_embeddings torch_dtype transformers_version unk_token_id use_cache
"""
_READ = """
    attention_bias bias draft_vocab_size head_dim hidden_act hidden_size intermediate_size layer_types
    max_position_embeddings mlp_bias num_attention_heads num_key_value_heads qkv_bias rms_norm_eps
    rope_parameters rope_scaling rope_theta sliding_window target_hidden_size truncated_vocab_size
    use_sliding_window vocab_size
"""
HARMLESS, READ = frozenset(_HARMLESS.split()), frozenset(_READ.split())
ROPE_TYPES = {  # with the numbers that each one needs
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
CORRECT = "correct the head's config.json, or download the head again"  # hint where a value makes no sense
_FULL = "only heads whose attention sees every token can be exported"
_MOST = 1e18  # of any number in a config.json: beyond it, floats and tensors run out
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


def read(config: Config, tensors: Tensors, target: TargetSizes) -> tuple[HeadSpec, Tensors]:
    """Read a SafeAILab head. The tensors' names are already the canonical ones.

    Layer ids are fixed in the reference: the inputs of layers 2, L//2 and L-3 for EAGLE-3, the last hidden
    state after the final norm for EAGLE-1. RoPE's base is 10000 where config.json has no rope_theta: the
    reference trainer never looks at the target's. Raises EagleError on flags that it cannot honour.
    """
    refuse_unknown(config, HARMLESS | READ)
    return base_spec(config, tensors, target, dialect="safeai"), tensors


def base_spec(config: Config, tensors: Tensors, target: TargetSizes, *, dialect: str) -> HeadSpec:
    """The part of the spec that a Llama config and the tensors' names and shapes decide."""
    eagle3 = any(name.startswith("midlayer.") for name in tensors)
    first = "midlayer." if eagle3 else "layers.0."
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    vocab = integer(config, "vocab_size")
    drafted = integer(config, "draft_vocab_size", integer(config, "truncated_vocab_size", vocab))
    theta, scaling = rope(config)
    refuse_windows_and_biases(config)
    spec = HeadSpec(
        algorithm="eagle3" if eagle3 else "eagle1",
        dialect=dialect,
        layers=count_layers(tensors),
        hidden_size=hidden,
        target_hidden_size=integer(config, "target_hidden_size", hidden),
        heads=heads,
        kv_heads=integer(config, "num_key_value_heads", heads),
        head_dim=head_dim(config, tensors, first, heads),
        intermediate_size=integer(config, "intermediate_size"),
        act=activation(config),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        vocab_size=vocab,
        draft_vocab_size=drafted if eagle3 else vocab,
        feature_layers=default_feature_layers(target.layers) if eagle3 else (target.layers,),
        max_positions=integer(config, "max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        fc_bias="fc.bias" in tensors,
        qkv_bias=f"{first}self_attn.q_proj.bias" in tensors,
        o_bias=f"{first}self_attn.o_proj.bias" in tensors,
        qk_norm=f"{first}self_attn.q_norm.weight" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
    )
    if heads % spec.kv_heads:
        raise EagleError(
            f"config.json of the head: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {spec.kv_heads}",
            hint=CORRECT,
        )
    for flag in ("qkv_bias", "attention_bias"):
        if config.get(flag) and not spec.qkv_bias:
            raise missing([f"{first}self_attn.q_proj.bias"], f"config.json says {flag}: true")
    return spec


def missing(names: Iterable[str], reason: str) -> EagleError:
    """The error for tensors that a checkpoint of its kind must have."""
    return EagleError(
        f"the head's checkpoint has no {listed(sorted(names))} ({reason})",
        hint="the file is incomplete, or config.json describes another head",
    )


def listed(names: Sequence[str]) -> str:
    """Names with commas between them, the first ones where there are many."""
    more = f" and {len(names) - 6} more" if len(names) > 7 else ""
    return ", ".join(names[:6] if more else names) + more


def refuse_unknown(config: Config, known: frozenset[str]) -> None:
    """Refuse keys that may change the computation; one that is null, false, zero or empty changes nothing."""
    unknown = sorted(key for key, value in config.items() if key not in known and value)
    if unknown:
        listed = ", ".join(f"{key}: {config[key]!r}" for key in unknown)
        raise EagleError(
            f"config.json of the head sets what this version does not know and cannot honour: {listed}",
            hint="if it does not change the head's computation, remove it from config.json",
        )


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number from config.json; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or not _positive(value):
        found = "nothing" if key not in config else repr(config[key])
        raise EagleError(
            f"config.json of the head: {key} must be a positive whole number, found {found}", hint=CORRECT
        )
    return value


def number(config: Config, key: str, default: float) -> float:
    """A positive number from config.json; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if not _positive(value):
        raise EagleError(
            f"config.json of the head: {key} must be a positive number, found {config[key]!r}", hint=CORRECT
        )
    return float(value)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST


def activation(config: Config) -> str:
    act = config.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise EagleError(
            f"config.json of the head: hidden_act {act!r} is not one of {', '.join(ACTIVATIONS)}",
            hint="use a head with one of them; what it was trained with cannot be changed",
        )
    return str(act)


def rope(config: Config) -> tuple[float, dict[str, Any]]:
    """RoPE base and scaling (empty = none), from the old keys or from Transformers 5's `rope_parameters`."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not isinstance(old, dict) or not isinstance(new, dict):
        odd = old if not isinstance(old, dict) else new
        raise EagleError(
            f"config.json of the head: rope_scaling and rope_parameters must be objects, found {odd!r}",
            hint=CORRECT,
        )
    scaling = {**old, **new}
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    theta = number({"rope_theta": scaling.pop("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    if (part := scaling.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise EagleError(
            f"config.json of the head: partial_rotary_factor must be 1, found {part!r}",
            hint="use a head that rotates all of its channels, as EAGLE-3 heads do",
        )
    if kind in (None, "default"):
        return theta, {}
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise EagleError(
            f"config.json of the head: RoPE type {kind!r} is not supported; expected default, "
            f"{', '.join(ROPE_TYPES)}",
            hint="a RoPE whose frequencies depend on the length or on images does not fit one static graph",
        )
    for key in ROPE_TYPES[kind]:
        if not _positive(scaling.get(key)):
            raise EagleError(
                f"config.json of the head: RoPE type {kind!r} needs a number {key}, found "
                f"{repr(scaling[key]) if key in scaling else 'none'}",
                hint=CORRECT,
            )
    for key, value in scaling.items():
        if value is not None and value != 0 and not isinstance(value, bool) and not _positive(value):
            raise EagleError(
                f"config.json of the head: {key} of RoPE must be a positive number, found {value!r}",
                hint=CORRECT,
            )
    return theta, {"rope_type": kind, **scaling}


def head_dim(config: Config, tensors: Tensors, first: str, heads: int) -> int:
    """Taken from q_proj: the older reference ignores config.json's `head_dim`, newer code honours it."""
    name = f"{first}self_attn.q_proj.weight"
    if name not in tensors:
        raise missing([name], "every head has it")
    rows = tensors[name].shape[0]
    declared = integer(config, "head_dim", max(1, integer(config, "hidden_size") // heads))
    fallback = integer(config, "hidden_size") // heads
    for size in (declared, fallback):
        if size * heads == rows:
            return size
    raise EagleError(
        f"{name} has {rows} rows, which fits neither head_dim {declared} nor {fallback} with "
        f"{heads} attention heads",
        hint="config.json and the weights are of different heads",
    )


def count_layers(tensors: Tensors) -> int:
    """From the names: config.json of some public heads still holds the target's number of layers."""
    numbers = [re.match(r"layers\.(\d{1,3})\.", name) for name in tensors]
    return 1 + max((int(found[1]) for found in numbers if found), default=0)


def refuse_windows_and_biases(config: Config) -> None:
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        window = integer(config, "sliding_window")
        positions = integer(config, "max_position_embeddings", 2048)
        if window < positions or config.get("use_sliding_window"):
            raise EagleError(
                f"config.json of the head: sliding-window attention ({window} of {positions} positions) "
                "is not supported",
                hint="if the head was trained with full attention, set use_sliding_window: false",
            )
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise EagleError(
            f"config.json of the head: layer_types must be a list, found {kinds!r}", hint=CORRECT
        )
    other = sorted({repr(kind) for kind in kinds} - {"'full_attention'"})
    if other:
        raise EagleError(
            f"config.json of the head: layer_types {', '.join(other)} not supported, expected "
            "'full_attention'",
            hint=_FULL,
        )
    if config.get("mlp_bias"):
        raise EagleError(
            "config.json of the head: mlp_bias: true is not supported, expected false",
            hint="use a head whose feed-forward block has no biases, as EAGLE's have none",
        )
