"""Checkpoints that come in FP8 already: ModelOpt's, compressed-tensors' and the plain "fp8" layout.

All three store a linear layer's weight as float8_e4m3fn [N, K] with a scale beside it (one, or one a row)
and, where activations have fixed scales, the scale of its input. Weights and scales are taken over as they
are, never quantised a second time; other schemes are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_export.checkpoints import fp8_schemes as schemes
from eagle_export.checkpoints import weights
from eagle_export.checkpoints.fp8_scales import Scales, check_positive
from eagle_export.checkpoints.stored import StoredTensor, stored_tensors
from eagle_export.checkpoints.weight_stream import Weight
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

    stored: StoredTensor
    shape: tuple[int, int]
    weight_scale: Tensor
    input_scale: float | None

    def read(self) -> Tensor:
        """float8_e4m3fn [N, K], the bytes of the file."""
        return self.stored.load()

    def dequantize(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop): scaled in float32, then rounded to `dtype`, as DequantizeLinear does."""
        stop = self.shape[0] if stop is None else stop
        scale = self.weight_scale if self.weight_scale.ndim == 0 else self.weight_scale[start:stop, None]
        return (self.stored.rows(start, stop).float() * scale).to(dtype)


@dataclass(frozen=True, eq=False)
class Dequantized:
    """An FP8 weight as a weight of another type."""

    layer: StoredLayer
    dtype: torch.dtype
    file_range: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layer.shape

    def rows(self, start: int, stop: int) -> Tensor:
        return self.layer.dequantize(self.dtype, start, stop)

    def load(self) -> Tensor:
        return self.layer.dequantize(self.dtype)


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

    def weights(self, dtype: torch.dtype) -> dict[str, Weight]:
        """All tensors of the model, the FP8 ones as `dtype`; what serves quantisation alone is left out."""
        by_name: dict[str, Weight] = {}
        for name, stored in _tensors(self.folder).items():
            layer = self.layers.get(name.removesuffix(".weight"))
            if layer is not None and name.endswith(".weight"):
                by_name[name] = Dequantized(layer, dtype)
            elif not name.endswith(_AUXILIARY):
                by_name[name] = stored
        return by_name


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
    if other := [path.name for path in weights.model_files(folder) if path.suffix != ".safetensors"]:
        raise EagleError(
            f"{folder}: the weights of a quantised model are expected in safetensors, found {other[0]}",
            hint="download the model again, with its *.safetensors",
        )
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
    if any(name.endswith(_CACHE_SCALES) for name in _tensors(folder)):
        notes.append("scales of an FP8 key-value cache are ignored: caches are in 16 bit here")
    return Checkpoint(folder, scheme.source, layers, tuple(notes))


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model in a folder, whatever file it is in."""
    return {
        name: tensor for path in weights.model_files(folder) for name, tensor in stored_tensors(path).items()
    }


def _layers(folder: Path) -> Iterator[tuple[str, StoredLayer]]:
    """Every FP8 weight with its scales, which may be in another file. Checks what belongs together."""
    tensors = _tensors(folder)
    quantized = [name for name in tensors if name.endswith(".weight") and tensors[name].dtype == _FP8]
    names = {name.removesuffix(".weight") for name in quantized}
    for name in tensors:
        _check_auxiliary(name, names, tensors, folder)
    for key in sorted(quantized):
        name, stored = key.removesuffix(".weight"), tensors[key]
        if len(stored.shape) != 2:
            raise EagleError(f"{folder}: {key} is in FP8 with shape {list(stored.shape)}, expected a matrix")
        rows, columns = stored.shape
        scale = _first(tensors, name, _WEIGHT_SCALES)
        if scale is None:
            raise EagleError(
                f"{folder}: {key} is in FP8 without {name}.weight_scale", hint="download the model again"
            )
        stored_scale = _first(tensors, name, _INPUT_SCALES)
        if stored_scale is not None and stored_scale.numel() != 1:
            raise EagleError(f"{folder}: {name} has {stored_scale.numel()} input scales, expected one")
        input_scale = None if stored_scale is None else float(stored_scale.float())
        if input_scale is not None:
            check_positive({name: input_scale}, str(folder))
        yield name, StoredLayer(stored, (rows, columns), _weight_scale(scale, rows, key), input_scale)


def _first(tensors: Mapping[str, StoredTensor], layer: str, endings: tuple[str, ...]) -> Tensor | None:
    matching = (tensors[layer + ending] for ending in endings if layer + ending in tensors)
    tensor = next(matching, None)
    return None if tensor is None else tensor.load()


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


def _check_auxiliary(name: str, layers: set[str], tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    if name.endswith((*_WEIGHT_SCALES, *_INPUT_SCALES)) and name.rpartition(".")[0] not in layers:
        raise EagleError(
            f"{folder}: {name} belongs to a weight that is not stored in FP8 E4M3",
            hint="the config and the weights are of different models; download it again",
        )
    if name.endswith(_ZERO_POINTS) and bool((tensors[name].load().float() != 0).any()):
        raise EagleError(f"{folder}: {name} is not zero; only symmetric FP8 is supported")
