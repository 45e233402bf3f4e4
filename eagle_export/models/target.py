"""The target: a causal language model of Transformers seen as one function of tokens, mask and cache.

Nothing of a family's model code is rewritten here. Its attention goes through `AttentionInterface` to our
attention, its cache writes go to our cache operator, and while a forward runs its RMS norm and rotation are
replaced by the operators of `graphs.ops`: on a CPU the dozen small operators behind each of them cost a third
of a decoding step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle_export.graphs import ops
from eagle_run.errors import EagleError, first_line

ATTENTION = "eagle_export"
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Rotations whose frequencies do not depend on the length of the sequence.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class TargetDims:
    """The sizes of a target that the rest of the project needs."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


def target_dims(config: Any) -> TargetDims:
    """Read the sizes from a Transformers config."""
    heads = config.num_attention_heads
    return TargetDims(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def check_family(config: Any, max_seq_len: int) -> None:
    """Raise EagleError unless a model of this config is computed exactly by the target graph.

    The graph attends to every token that the mask shows, at rotation frequencies fixed when it is traced.
    So the family must be one whose parity is tested, no layer may look back less than `max_seq_len` tokens,
    and the rotation must not depend on the length of the sequence.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise EagleError(
            f"target family {family!r} is not supported, expected one of {', '.join(sorted(FAMILIES))}",
            hint="use a Llama, Mistral (dense), Qwen2 or dense Qwen3 model",
        )
    _check_layers(config, max_seq_len)
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise EagleError(
            f"{FAMILIES[family]} target with {kind!r} rotary scaling: its frequencies change with the length "
            f"of the sequence, but a graph needs fixed ones; expected one of {', '.join(STATIC_ROPE)}",
            hint="set rope_parameters in the target's config.json to a fixed scaling, or use another target",
        )
    if max_seq_len > config.max_position_embeddings:
        raise EagleError(
            f"max_seq_len is {max_seq_len}, but this target knows only "
            f"{config.max_position_embeddings} positions",
            hint=f"use --max-seq-len {config.max_position_embeddings} or less",
        )


def _check_layers(config: Any, max_seq_len: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type == "mistral" and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}  # Mistral has no layer_types: the window holds for every layer
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other:
        raise EagleError(
            f"{FAMILIES[config.model_type]} target with {', '.join(other)} layers, "
            "expected full attention in every layer",
            hint="use a target with full attention in every layer",
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_seq_len:
        raise EagleError(
            f"{FAMILIES[config.model_type]} target with a sliding window of {window} tokens: the graph "
            f"attends to everything, the same only up to that length, but max_seq_len is {max_seq_len}",
            hint=f"use --max-seq-len {window} or less",
        )


def load_target(folder: Path, dtype: torch.dtype) -> Any:
    """The causal LM in a local Hugging Face folder (config.json and weights), in eval mode.

    Reads nothing but the folder; safetensors are preferred to .bin files. Weights that come in FP8 (see
    `fp8.checkpoint`) are dequantised. Raises EagleError when a file is missing or damaged, when the weights
    are not exactly the tensors of the model in config.json, or are quantised in another way.
    """
    from transformers import AutoModelForCausalLM

    from eagle_export.fp8.checkpoint import read_checkpoint

    given = read_checkpoint(folder)
    load = AutoModelForCausalLM.from_pretrained if given is None else given.from_pretrained
    try:
        model, info = load(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # whatever Transformers, safetensors or torch run into
        raise EagleError(
            f"{folder}: expected config.json and whole weight files of a causal model: {first_line(error)}",
            hint="download the model again; a file may be missing or cut short",
        ) from error
    for key, fault in (
        ("missing_keys", "the weights lack"),
        ("mismatched_keys", "the weights have another shape for"),
        ("unexpected_keys", "the model has no place for"),
    ):
        if names := sorted(str(name[0] if isinstance(name, tuple) else name) for name in info.get(key) or ()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EagleError(
                f"{folder}: {fault} {names[0]}{more}",
                hint="config.json and the weights must belong to one model; download it again",
            )
    return model.eval()


class TargetModule(nn.Module):
    """A Transformers causal LM with exactly the inputs and outputs of the target graph.

    `feature_layers` are indices into Transformers' `hidden_states`, ascending: i is the residual stream
    before layer i, and L (the number of layers) the output of the final norm.

    Use `model.eval()` models; the wrapped model is not changed and can be used by others in between, but not
    by another thread while a forward runs here.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.dims = target_dims(model.config)
        self.feature_layers = tuple(feature_layers)
        bad = [i for i in self.feature_layers if not 0 <= i <= self.dims.layers]
        if bad or list(self.feature_layers) != sorted(set(self.feature_layers)) or not self.feature_layers:
            raise EagleError(
                f"feature layers {list(self.feature_layers)} do not fit a target with {self.dims.layers} "
                f"layers: expected ascending indices from 0 to {self.dims.layers}"
            )
        parameters = inspect.signature(model.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        write_index: Tensor,
        logits_index: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        """One forward over T rows per sequence.

        input_ids, position_ids int64 [B, T]; tree_mask bool [B, 1, T, KV]; write_index int64 [B] (first cache
        row to write); logits_index int64 [B, R]; past = key and value of each layer in turn, [B, Hkv, S, Dh].

        Returns logits float32 [B, R, V], features [B, T, n * H], then key and value of each layer. In eager
        mode those are the tensors of `past`, written in place.
        """
        cache = _Rows(past, write_index)
        with native_operators(self.model):
            out = self.model.model(
                input_ids=input_ids,
                attention_mask=tree_mask,
                position_ids=position_ids,
                use_cache=True,
                output_hidden_states=True,
                **{self._cache_argument: cache},
            )
            features = torch.cat([out.hidden_states[i] for i in self.feature_layers], dim=-1)  # [B, T, n * H]
            rows = ops.gather_rows(out.last_hidden_state, logits_index)  # [B, R, H]
            logits = self.model.get_output_embeddings()(rows).float()  # [B, R, V]
        return (logits, features, *cache.tensors)


class _Rows:
    """The part of Transformers' Cache that a decoder layer uses, over cache tensors that the caller owns."""

    def __init__(self, past: Sequence[Tensor], write_index: Tensor) -> None:
        self.tensors = list(past)
        self.write_index = write_index

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        k, v = 2 * layer, 2 * layer + 1
        self.tensors[k] = ops.cache_update(self.tensors[k], key, self.write_index)
        self.tensors[v] = ops.cache_update(self.tensors[v], value, self.write_index)
        return self.tensors[k], self.tensors[v]


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    out = ops.attention(query, key, value, attention_mask, scaling)  # [B, Hq, T, Dh]
    return out.transpose(1, 2), None


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return ops.linear(x, self.weight, self.bias)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _rope_forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    # Half the width of what Transformers returns: the operator wants each frequency once.
    angle = position_ids[..., None].float() * self.inv_freq.float()  # [B, T, Dh/2]
    scale = self.attention_scaling
    cos, sin = angle.cos(), angle.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(x.dtype), sin.to(x.dtype)


def _apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)


AttentionInterface.register(ATTENTION, _attention_forward)


@contextmanager
def native_operators(model: Any) -> Iterator[None]:
    """While this lasts, `model`'s attention, RMS norm and rotation are those of `graphs.ops`.

    The replaced parts are found by name in the module that defines the model's class; a family that lacks one
    of them is refused. Everything is put back at the end, also after an error.
    """
    module = sys.modules[type(model).__module__]
    norms = [cls for key, cls in vars(module).items() if key.endswith("RMSNorm") and inspect.isclass(cls)]
    ropes = [
        cls for key, cls in vars(module).items() if key.endswith("RotaryEmbedding") and inspect.isclass(cls)
    ]
    if len(norms) != 1 or len(ropes) != 1 or not hasattr(module, "apply_rotary_pos_emb"):
        raise EagleError(
            f"{module.__name__} has {len(norms)} RMSNorm and {len(ropes)} RotaryEmbedding classes, "
            "expected one each and a function apply_rotary_pos_emb",
            hint="install the version of transformers that this package pins",
        )
    config: Any = model.config
    replaced: list[tuple[Any, str, Any]] = [
        (nn.Linear, "forward", _linear_forward),
        (norms[0], "forward", _norm_forward),
        (ropes[0], "forward", _rope_forward),
        (module, "apply_rotary_pos_emb", _apply_rotary),
        (config, "_attn_implementation", ATTENTION),
    ]
    before = [getattr(owner, key) for owner, key, _ in replaced]
    try:
        for owner, key, new in replaced:
            setattr(owner, key, new)
        yield
    finally:
        for (owner, key, _), old in zip(replaced, before, strict=True):
            setattr(owner, key, old)
