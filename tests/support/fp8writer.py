"""Writes FP8 checkpoints of a tiny target in the dialects that are read, from plain definitions of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.fp8ref import nearest

FP8 = torch.float8_e4m3fn


def stored(weight: Tensor, channel: bool) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> its FP8 numbers and the scale [] or [N, 1] that takes them back."""
    amax = weight.abs().amax(1, keepdim=True) if channel else weight.abs().amax()
    scale = amax / 448
    return torch.from_numpy(nearest((weight / scale).numpy())).to(FP8), scale  # exact: they are FP8 numbers


def write_quantized(
    folder: Path,
    target: Path,
    *,
    config: dict[str, Any],
    channel: bool = False,
    static: bool = True,
    skip: tuple[str, ...] = ("lm_head",),
    names: tuple[str, str] = ("weight_scale", "input_scale"),
    scale_dtype: torch.dtype = torch.float32,
    extra: dict[str, Tensor] | None = None,
    separate: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """The target in `target` with its linear layers in FP8; returns the tensors that were written.

    config: quantization_config of config.json. separate: the content of hf_quant_config.json, if any.
    """
    folder.mkdir(parents=True)
    for path in target.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    tensors: dict[str, Tensor] = {}
    for index, (name, weight) in enumerate(sorted(load_file(target / "model.safetensors").items())):
        layer = name.removesuffix(".weight")
        if not layer.endswith(("_proj", "lm_head")) or any(part in layer for part in skip):
            tensors[name] = weight
            continue
        values, scale = stored(weight, channel)
        if scale_dtype != torch.float32:
            scale = scale.to(scale_dtype)
        tensors[name] = values
        tensors[f"{layer}.{names[0]}"] = scale
        if static:
            tensors[f"{layer}.{names[1]}"] = torch.tensor(0.01 + index / 1e4)
    tensors |= extra or {}
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    if config:
        content["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(content))
    if separate is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(separate))
    return tensors


MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def compressed(
    strategy: str = "channel", *, dynamic: bool = True, kind: str = "float", bits: int = 8, **changes: Any
) -> dict[str, Any]:
    """quantization_config as llm-compressor writes it."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    inputs = {
        "num_bits": bits,
        "type": kind,
        "strategy": "token" if dynamic else "tensor",
        "symmetric": True,
        "dynamic": dynamic,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **changes,
    }


PLAIN = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
