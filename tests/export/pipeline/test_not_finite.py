"""Weights that are no finite numbers are refused by name, of a target as of a head, written as linked."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exportcli import leftovers
from support.tiny import build_bundle

from eagle_export.checkpoints.stored import StoredTensor, is_finite, stored_tensors
from eagle_export.checkpoints.weight_stream import Converted, InMemory, Streamed
from eagle_export.models.target import load_target
from eagle_run.errors import EagleError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def spoilt(folder: Path, name: str, value: float, copy: Path, dtype: torch.dtype | None = None) -> Path:
    """A copy of a checkpoint with `value` as the last number of a tensor; in `dtype`, if given."""
    shutil.copytree(folder, copy)
    tensors = {key: tensor.to(dtype or tensor.dtype) for key, tensor in load_file(file_of(copy)).items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file_of(copy), metadata={"format": "pt"})
    return copy


def file_of(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_finite(dtype: torch.dtype, value: float) -> None:
    values = torch.linspace(-300, 300, 21).to(dtype)
    assert is_finite(values)
    values[7] = math.nan if dtype == torch.float8_e4m3fn else value  # E4M3 has no inf
    assert not is_finite(values)
    assert not is_finite(values.view(7, 3).t())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_whole_numbers_are_finite(dtype: torch.dtype) -> None:
    assert is_finite(torch.ones(3, dtype=dtype))
    assert is_finite(torch.ones(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", math.inf),
        ("model.layers.1.self_attn.k_proj.weight", -math.inf),  # written side by side with q and v
        ("model.norm.weight", math.nan),  # small: kept in the ONNX file itself
        ("lm_head.weight", math.nan),
    ],
)
def test_a_target_is_not_built(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, name: str, value: float
) -> None:
    target = spoilt(tiny_target, name, value, tmp_path / "target")
    with pytest.raises(EagleError, match=f"{name} holds values that are not finite numbers") as caught:
        build_bundle(target, tiny_head, tmp_path / "out" / "bundle")
    assert "download the model again" in caught.value.hint
    assert "bundle" not in leftovers(tmp_path / "out")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
def test_in_every_precision(tiny_target: Path, tmp_path: Path, precision: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    target = spoilt(tiny_target, name, math.nan, tmp_path / "target")
    with pytest.raises(EagleError, match=f"{name} holds values that are not finite numbers"):
        build_bundle(target, "none", tmp_path / "bundle", precision=precision, measure=False)


def test_a_linked_weight_is_looked_at_too(tiny_target: Path, tmp_path: Path) -> None:
    """Nothing else of a build would read it."""
    name = "model.embed_tokens.weight"
    target = spoilt(tiny_target, name, math.inf, tmp_path / "target")
    with pytest.raises(EagleError, match=f"{name} holds values that are not finite numbers"):
        build_bundle(target, "none", tmp_path / "bundle", link_weights=True)


def test_a_target_in_torchs_own_format(tiny_target: Path, tmp_path: Path) -> None:
    target = spoilt(tiny_target, "lm_head.weight", math.nan, tmp_path / "target")
    torch.save(load_file(file_of(target)), target / "pytorch_model.bin")
    file_of(target).unlink()
    with pytest.raises(EagleError, match=r"lm_head\.weight holds values that are not finite numbers"):
        build_bundle(target, "none", tmp_path / "bundle")


def test_a_head_is_not_built(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> None:
    head = spoilt(tiny_head, "fc.weight", math.nan, tmp_path / "head")
    with pytest.raises(EagleError, match=r"fc\.weight of the head holds values that are not finite numbers"):
        build_bundle(tiny_target, head, tmp_path / "bundle")


def test_a_target_that_is_loaded(tiny_target: Path, tmp_path: Path) -> None:
    """For calibration, training or making data. What only a narrow type cannot hold says so."""
    target = spoilt(tiny_target, "lm_head.weight", math.nan, tmp_path / "target")
    with pytest.raises(
        EagleError, match=r"lm_head\.weight holds values that are not finite numbers in float32"
    ):
        load_target(target, torch.float32)
    wide = spoilt(tiny_target, "lm_head.weight", 1e5, tmp_path / "wide")
    load_target(wide, torch.bfloat16)
    with pytest.raises(EagleError, match=r"lm_head\.weight holds .* in float16") as caught:
        load_target(wide, torch.float16)
    assert "bf16" in caught.value.hint


def test_values_as_they_are_stored(tmp_path: Path) -> None:
    """What is written in the type in which it is stored, FP8 weights among them; a conversion in between."""
    for dtype in (torch.float16, torch.float8_e4m3fn):
        values = torch.ones(4, 3).to(dtype)
        values[3, 1] = math.nan
        save_file({"layer.weight": values}, file_of(tmp_path))
        stored: StoredTensor = stored_tensors(file_of(tmp_path))["layer.weight"]
        for weight in (stored, Converted(stored, torch.bfloat16)):
            with pytest.raises(EagleError, match=r"^layer\.weight holds values that are not finite numbers"):
                Streamed("merged", [(weight, (1, 0))], weight.dtype).tobytes()
        with pytest.raises(EagleError, match=r"^merged holds values that are not finite numbers"):
            Streamed("merged", [(InMemory(values), None)], dtype).check_finite()
