"""The target: a causal language model of Transformers seen as one function of tokens, mask and cache.

Nothing of a family's model code is rewritten here. Its attention goes through `AttentionInterface` to our
attention, its cache writes go to our cache operator, and while a forward runs its RMS norm and rotation are
replaced by the operators of `graphs.ops` (see `native`), as `families` says for each family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.checkpoints import weights
from eagle_export.checkpoints.pickled import unpickling_error, why_refused
from eagle_export.checkpoints.stored import is_finite
from eagle_export.heads.spec import raw_last
from eagle_export.models import ops
from eagle_export.models.families import NO_TEXT, TEXT_KEYS, Span, family_of, layer_spans, text_part
from eagle_export.models.native import replaced
from eagle_run.errors import EagleError, first_line


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


def load_target(folder: Path, dtype: torch.dtype) -> Any:
    """The causal LM in a local Hugging Face folder (config.json and weights), in eval mode.

    Reads nothing but the folder; safetensors are preferred to .bin files. Weights that come in FP8 (see
    `fp8.checkpoint`) are dequantised. Raises EagleError when a file is missing or damaged, when the weights
    are not exactly the tensors of the model in config.json, or are quantised in another way.
    """
    from transformers import AutoModelForCausalLM

    from eagle_export.checkpoints.fp8_checkpoint import read_checkpoint

    weights.model_files(folder)  # says better than Transformers which file is not there
    checkpoint = read_checkpoint(folder)
    if checkpoint is not None:
        stored = checkpoint.weights(dtype)
        return load_tensors(folder, {name: weight.load() for name, weight in stored.items()}, dtype)

    def load(options: dict[str, Any]) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, config=_text_config(folder), **options)

    return _checked(folder, load, dtype)


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """`load_target` with tensors in place of those in the weight files; config.json is the folder's.

    What the config says of a quantisation is left out: it would want the library that wrote the weights.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    def load(options: dict[str, Any]) -> Any:
        config = _text_config(folder)
        for key in ("quantization_config", "compression_config"):
            if hasattr(config, key):
                delattr(config, key)
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return model.from_pretrained(None, config=config, state_dict=dict(tensors), **options)

    return _checked(folder, load, dtype)


def _text_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return text_part(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))


def _checked(folder: Path, load: Callable[[dict[str, Any]], Any], dtype: torch.dtype) -> Any:
    """The model that `load` makes with Transformers, if every weight found its place and every place one."""
    options = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": False,
        "output_loading_info": True,
        "key_mapping": TEXT_KEYS,
    }
    try:
        model, info = load(options)
    except EagleError:
        raise
    except Exception as error:  # whatever Transformers, safetensors or torch run into
        why = why_refused(error) if unpickling_error(error) else first_line(error)
        raise EagleError(
            f"{folder}: expected config.json and whole weight files of a causal model: {why}",
            hint="download the model again; a file may be missing or cut short",
        ) from error
    for key, fault in (
        ("missing_keys", "the weights lack"),
        ("mismatched_keys", "the weights have another shape for"),
        ("unexpected_keys", "the model has no place for"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in info.get(key) or ())
        if names := [name for name in names if key != "unexpected_keys" or not name.startswith(NO_TEXT)]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EagleError(
                f"{folder}: {fault} {names[0]}{more}",
                hint="config.json and the weights must belong to one model; download it again",
            )
    for name, tensor in model.state_dict().items():
        if type(tensor.data) is Tensor and not is_finite(tensor):  # a recorded one has no values yet
            kind = str(dtype).removeprefix("torch.")
            raise EagleError(
                f"{folder}: {name} holds values that are not finite numbers in {kind}",
                hint="build in bf16 or fp32; if it is the same, download the model again",
            )
    return model.eval()


class TargetModule(nn.Module):
    """A Transformers causal LM with exactly the inputs and outputs of the target graph.

    `feature_layers` are indices into Transformers' `hidden_states`, ascending: i is the residual stream
    before layer i, and L (the number of layers) the output of the final norm; L + 1 is what that norm reads.
    `max_seq_len`: no sequence is longer, which makes longer windows needless; None where that is not known.

    Use `model.eval()` models; the wrapped model is not changed and can be used by others in between, but not
    by another thread while a forward runs here.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int], max_seq_len: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.dims = target_dims(model.config)
        self.feature_layers = tuple(feature_layers)
        self._longest = max_seq_len
        last = raw_last(self.dims.layers)
        bad = [i for i in self.feature_layers if not 0 <= i <= last]
        if bad or list(self.feature_layers) != sorted(set(self.feature_layers)) or not self.feature_layers:
            raise EagleError(
                f"feature layers {list(self.feature_layers)} do not fit a target with {self.dims.layers} "
                f"layers: expected ascending indices from 0 to {last}",
                hint="a build takes others",
                parameters=["head_layer_ids"],
            )
        self._one_mask = family_of(model.config).masks == "one"
        self._spans = layer_spans(model.config)
        self._cap = getattr(model.config, "final_logit_softcapping", None)
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
        with native_operators(self.model), residual_streams(self.model) as streams:
            out = self.model.model(
                input_ids=input_ids,
                attention_mask=self._masks(tree_mask, position_ids, write_index, rows=past[0].shape[2]),
                position_ids=position_ids,
                use_cache=True,
                output_hidden_states=True,
                **{self._cache_argument: cache},
            )
            states = streams(out)
            features = torch.cat([states[i] for i in self.feature_layers], dim=-1)  # [B, T, n * H]
            rows = ops.gather_rows(out.last_hidden_state, logits_index)  # [B, R, H]
            logits = self.model.get_output_embeddings()(rows)  # [B, R, V]
            if self._cap is not None:
                logits = torch.tanh(logits / self._cap) * self._cap
        return (logits.float(), features, *cache.tensors)

    def _masks(self, tree_mask: Tensor, position_ids: Tensor, write_index: Tensor, *, rows: int) -> Any:
        """The mask of all layers, or one by layer type, as the family's forward takes it.

        A window or chunk as long as the cache (of `rows` rows) or as the longest sequence hides nothing, and
        costs nothing. (A row at a position behind the longest sequence is of a draft that will be cut off.)
        """
        reach = rows if self._longest is None else min(rows, self._longest)
        masks = {}
        for kind, span in self._spans.items():
            masks[kind] = tree_mask
            if span is not None and span.size < reach:
                masks[kind] = _narrowed(tree_mask, position_ids, write_index, span)
        return next(iter(masks.values())) if self._one_mask else masks


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


def _narrowed(tree_mask: Tensor, position_ids: Tensor, write_index: Tensor, span: Span) -> Tensor:
    if tree_mask.dtype == torch.bool:
        return ops.narrow_mask(tree_mask, position_ids, write_index, span.kind, span.size)
    # What `EagerGraph` gives on a GPU: a bias [B, 1, G * T, KV] and the rows to write [B, T].
    count, dtype = position_ids.shape[1], tree_mask.dtype
    seen = ops.narrow_mask(
        tree_mask[:, :, :count] == 0, position_ids, write_index[:, 0], span.kind, span.size
    )
    return ops.attention_bias(seen, tree_mask.shape[2] // count, dtype)


@contextmanager
def residual_streams(model: Any) -> Iterator[Callable[[Any], Sequence[Tensor]]]:
    """While this lasts, what is yielded makes of a forward's output the states that a head can read.

    [B, T, H] each: Transformers' hidden_states, the last of which is after the final norm, and behind them
    what that norm read.
    """
    raw: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    try:
        yield lambda out: (*out.hidden_states, raw[-1])
    finally:
        hook.remove()


def native_operators(model: Any) -> AbstractContextManager[None]:
    """While this lasts, `model`'s attention, norms, rotation and experts are those of its family's entry."""
    return replaced(model, family_of(model.config).replacements())
