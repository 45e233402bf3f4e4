"""Checkpoints that come in FP8 already: ModelOpt's, compressed-tensors' and the plain "fp8" layout.

All three store a linear layer's weight as float8_e4m3fn [N, K] with a scale beside it (one, or one a row)
and, where activations have fixed scales, the scale of its input. Weights and scales are taken over as they
are, never quantised a second time; other schemes are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_export import weights
from eagle_export.fp8 import schemes
from eagle_export.fp8.scales import Scales, check_positive
from eagle_run.errors import EagleError

# Of an FP8 cache for keys and values, which the graphs do not have: their caches are in 16 bit.
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale")
_ZERO_POINTS = (".weight_zero_point", ".input_zero_point")
_WEIGHT_SCALES = (".weight_scale", ".weight_scale_inv")
_INPUT_SCALES = (".input_scale", ".activation_scale")
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """A linear layer's FP8 weight [N, K] in its file, and its scales.

    weight_scale: float32 [] or [N]. input_scale: None where activations were meant to be scaled on the fly.
    """

    file: Path
    name: str
    shape: tuple[int, int]
    weight_scale: Tensor
    input_scale: float | None

    def read(self) -> Tensor:
        """float8_e4m3fn [N, K], the bytes of the file."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(f"{self.name}.weight")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]: scaled in float32, then rounded to `dtype`, as DequantizeLinear does."""
        scale = self.weight_scale if self.weight_scale.ndim == 0 else self.weight_scale[:, None]
        return (self.read().float() * scale).to(dtype)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The FP8 layers of a model folder by name. `source` is the dialect; `notes` are for the user."""

    folder: Path
    source: str
    layers: Mapping[str, StoredLayer]
    notes: tuple[str, ...]

    @property
    def static(self) -> bool:
        """Whether every layer brings its input scale, so that the target needs no calibration."""
        return all(layer.input_scale is not None for layer in self.layers.values())

    def join(self, scales: Scales | None = None) -> Scales:
        """The target's scales as given, those that are not from `scales`, and everything else of `scales`.

        Only layers that the checkpoint has in FP8 remain of the target. Raises EagleError where a scale is
        neither given nor in `scales`.
        """
        calibrated = {} if scales is None else scales.inputs.get("target", {})
        target: dict[str, float] = {}
        for name, layer in self.layers.items():
            value = layer.input_scale if layer.input_scale is not None else calibrated.get(name)
            if value is None:
                raise EagleError(
                    f"the checkpoint has no input scale for {name}, and calibration saw no such layer",
                    hint="calibrate this target first",
                )
            target[name] = value
        if scales is None:
            return Scales({"target": target}, {}, 0, self.source)
        return replace(scales, inputs={**scales.inputs, "target": target}, source=self.source)

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors of the model, dequantised; what serves quantisation alone is left out."""
        tensors: dict[str, Tensor] = {}
        for path, names in _contents(self.folder):
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                for name in names:
                    layer = self.layers.get(name.removesuffix(".weight"))
                    if layer is not None and name.endswith(".weight"):
                        tensors[name] = layer.dequantize(dtype)
                    elif not name.endswith(_AUXILIARY):
                        tensors[name] = file.get_tensor(name)
        return tensors

    def from_pretrained(self, folder: Path, *, dtype: torch.dtype, **options: Any) -> Any:
        """As Transformers' own, with dequantised weights: it would want the library that wrote them.

        folder and options as for `AutoModelForCausalLM.from_pretrained`.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for key in ("quantization_config", "compression_config"):
            if hasattr(config, key):
                delattr(config, key)
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        state = self.state_dict(dtype)
        return model.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options)


_AUXILIARY = (*_CACHE_SCALES, *_ZERO_POINTS, *_WEIGHT_SCALES, *_INPUT_SCALES)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The FP8 layers of a model folder; None where nothing says that it is quantised.

    Headers and scales are read, weights are not. Raises EagleError for a scheme that is not FP8 with one
    scale a tensor or a row, and for tensors that are not what the scheme says.
    """
    config = weights.read_config(folder)
    scheme = schemes.find(folder, config)
    if scheme is None:
        return None
    if not any(folder.glob("*.safetensors")):
        raise EagleError(f"{folder}: a quantised model without safetensors", hint="download the model again")
    layers = dict(_layers(folder))
    if not layers:
        raise EagleError(
            f"{folder}: the config names {scheme.title}, but no weight is stored in FP8",
            hint="export the quantised model again, compressed",
        )
    notes = [*scheme.notes, f"{len(layers)} linear layers come in FP8 ({scheme.title}) and are taken over"]
    if missing := sum(layer.input_scale is None for layer in layers.values()):
        notes.append(
            f"{missing} of them bring no input scale: fixed ones are calibrated, since scales that follow a "
            "forward's rows would make a row depend on its neighbours"
        )
    if any(name.endswith(_CACHE_SCALES) for _, names in _contents(folder) for name in names):
        notes.append("scales of an FP8 key-value cache are ignored: caches are in 16 bit here")
    return Checkpoint(folder, scheme.source, layers, tuple(notes))


def _contents(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield path, list(file.keys())


def _layers(folder: Path) -> Iterator[tuple[str, StoredLayer]]:
    """Every FP8 weight with its scales, which may be in another file. Checks what belongs together."""
    where = {name: path for path, names in _contents(folder) for name in names}
    reader = _Reader(where)
    quantized = [name for name in where if name.endswith(".weight") and reader.dtype(name) == "F8_E4M3"]
    names = {name.removesuffix(".weight") for name in quantized}
    for name in where:
        _check_auxiliary(name, names, reader, folder)
    for key in sorted(quantized):
        name = key.removesuffix(".weight")
        shape = reader.shape(key)
        if len(shape) != 2:
            raise EagleError(f"{folder}: {key} is in FP8 with shape {list(shape)}, expected a matrix")
        scale = reader.first(name, _WEIGHT_SCALES)
        if scale is None:
            raise EagleError(
                f"{folder}: {key} is in FP8 without {name}.weight_scale", hint="download the model again"
            )
        given = reader.first(name, _INPUT_SCALES)
        if given is not None and given.numel() != 1:
            raise EagleError(f"{folder}: {name} has {given.numel()} input scales, expected one")
        input_scale = None if given is None else float(given.float())
        if input_scale is not None:
            check_positive({name: input_scale}, str(folder))
        yield (
            name,
            StoredLayer(
                where[key], name, (shape[0], shape[1]), _weight_scale(scale, shape[0], key), input_scale
            ),
        )


def _weight_scale(scale: Tensor, rows: int, key: str) -> Tensor:
    """float32 [] or [N] of what is stored as [], [1], [1, 1], [N] or [N, 1] in any floating-point type."""
    if scale.numel() == 1:
        result = scale.float().reshape(())
    elif tuple(scale.shape) in ((rows,), (rows, 1)):
        result = scale.float().reshape(rows)
    else:
        raise EagleError(
            f"{key} has scales of shape {list(scale.shape)}, expected one or one for each of {rows} rows",
            hint="block-wise scales are not supported; use a checkpoint with scales per tensor or channel",
        )
    if not bool(torch.isfinite(result).all() & (result > 0).all()):
        raise EagleError(f"{key} has scales that are not positive numbers", hint="download the model again")
    return result


def _check_auxiliary(name: str, layers: set[str], reader: _Reader, folder: Path) -> None:
    if name.endswith((*_WEIGHT_SCALES, *_INPUT_SCALES)) and name.rpartition(".")[0] not in layers:
        raise EagleError(
            f"{folder}: {name} belongs to a weight that is not stored in FP8 E4M3",
            hint="the config and the weights are of different models; download it again",
        )
    if name.endswith(_ZERO_POINTS) and bool((reader.tensor(name).float() != 0).any()):
        raise EagleError(f"{folder}: {name} is not zero; only symmetric FP8 is supported")


class _Reader:
    """Tensors and their headers by name, whatever file they are in."""

    def __init__(self, where: Mapping[str, Path]) -> None:
        self._where = where
        self._headers: dict[Path, dict[str, Any]] = {}

    def _header(self, name: str) -> dict[str, Any]:
        path = self._where[name]
        if path not in self._headers:
            self._headers[path] = weights.read_header(path)
        return self._headers[path][name]

    def dtype(self, name: str) -> str:
        return str(self._header(name)["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header(name)["shape"])

    def tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._where[name], framework="pt") as file:
            return file.get_tensor(name)

    def first(self, layer: str, endings: tuple[str, ...]) -> Tensor | None:
        for ending in endings:
            if layer + ending in self._where:
                return self.tensor(layer + ending)
        return None
