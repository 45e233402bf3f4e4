"""Quantised targets that are not taken over: other schemes by name, and tensors that contradict theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.fp8writer import PLAIN, compressed, write_quantized

from eagle_export.checkpoints.fp8_checkpoint import read_checkpoint
from eagle_export.models.target import load_target
from eagle_run.errors import EagleError


def _modelopt(algorithm: str) -> dict[str, Any]:
    return {"config": {}, "separate": {"quantization": {"quant_algo": algorithm}}}


_INT4 = compressed("group", kind="int", bits=4, format="pack-quantized")
_FP4 = compressed("tensor_group", bits=4, format="nvfp4-pack-quantized")
_BLOCKS = {**PLAIN, "weight_block_size": [128, 128]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": (_modelopt("NVFP4"), "ModelOpt's NVFP4"),
    "modelopt-awq": ({"config": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}}, "W4A16_AWQ"),
    "modelopt-blocks": (_modelopt("FP8_PB_WO"), "FP8_PB_WO"),
    "modelopt-odd": ({"config": {}, "separate": {"other": 1}}, "key quantization"),
    "int8": ({"config": compressed(kind="int", format="int-quantized")}, r"int-quantized W8 \(int\) A8"),
    "w4a16": ({"config": _INT4}, "pack-quantized W4"),
    "fp4": ({"config": _FP4}, "nvfp4-pack"),
    "groups": ({"config": compressed("group")}, "with group scales"),
    "preset": ({"config": compressed(config_groups={"W4A16": ["Linear"]})}, "compressed-tensors"),
    "sparse": ({"config": compressed(sparsity_config={"format": "sparse-24-bitmask"})}, "sparse-24"),
    "blocks": ({"config": _BLOCKS}, "one weight scale per block of 128x128"),
    "awq": ({"config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
    "gptq": ({"config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
    "bitsandbytes": ({"config": {"quant_method": "bitsandbytes"}}, "BITSANDBYTES"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_other_schemes_are_refused_by_name(kind: str, tiny_target: Path, tmp_path: Path) -> None:
    options, named = REFUSED[kind]
    write_quantized(tmp_path / "target", tiny_target, **options)
    with pytest.raises(EagleError, match=named) as caught:
        load_target(tmp_path / "target", torch.float32)
    if kind != "modelopt-odd":
        assert "16-bit checkpoint" in caught.value.hint


def _damage(tensors: dict[str, torch.Tensor], kind: str) -> None:
    key = "model.layers.1.mlp.up_proj"
    new = {
        "blocks": ("weight_scale", torch.ones(2, 2)),
        "negative": ("weight_scale", torch.tensor(-1.0)),
        "input zero": ("input_scale", torch.tensor(0.0)),
        "many inputs": ("input_scale", torch.ones(3)),
        "not fp8": ("weight", tensors[f"{key}.weight"].float()),
        "asymmetric": ("weight_zero_point", torch.tensor(1, dtype=torch.int8)),
    }
    if kind == "no scale":
        del tensors[f"{key}.weight_scale"]
    elif kind == "nothing":
        for name in list(tensors):
            if name.endswith("_scale"):
                del tensors[name]
            else:
                tensors[name] = tensors[name].float()
    else:
        name, value = new[kind]
        tensors[f"{key}.{name}"] = value


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("no scale", "without model.layers.1.mlp.up_proj.weight_scale"),
        ("blocks", r"scales of shape \[2, 2\]"),
        ("negative", "not positive"),
        ("input zero", "positive number"),
        ("many inputs", "3 input scales"),
        ("not fp8", "belongs to a weight that is not stored in FP8"),
        ("asymmetric", "only symmetric"),
        ("nothing", "no weight is stored in FP8"),
    ],
)
def test_tensors_that_contradict_the_scheme_are_refused(
    kind: str, named: str, tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    tensors = write_quantized(folder, tiny_target, config=PLAIN)
    _damage(tensors, kind)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EagleError, match=named):
        read_checkpoint(folder)
