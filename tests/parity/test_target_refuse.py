"""Targets that the graph would compute wrongly, or that are not there in full, are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.targetmaker import KINDS, make_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
)

from eagle_export.models.families import check_family
from eagle_export.models.target import load_target, target_dims
from eagle_run.errors import EagleError

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("kind", KINDS)
def test_supported_families_pass(kind: str) -> None:
    check_family(KINDS[kind]().config, 64)  # phi3-mini's rotation is fixed up to there


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "'gpt2' is not supported"),
        (MixtralConfig(), "'mixtral' is not supported"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "'dynamic'",
        ),
        (LlamaConfig(rope_parameters=LONG, hidden_size=64, num_attention_heads=4), "'longrope'"),
        (LlamaConfig(max_position_embeddings=255), "255"),
    ],
)
def test_what_would_be_wrong_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(EagleError, match=reason) as caught:
        check_family(config, 256)
    assert caught.value.hint


def test_dims() -> None:
    dims = target_dims(KINDS["qwen3"]().config)
    assert (dims.layers, dims.hidden_size, dims.heads, dims.kv_heads, dims.head_dim) == (3, 64, 4, 2, 24)
    assert (dims.vocab_size, dims.max_positions) == (128, 256)
    assert target_dims(LlamaConfig(hidden_size=64, num_attention_heads=4)).head_dim == 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_load_target(folder: Path) -> None:
    model = load_target(folder, torch.float16)
    assert not model.training
    assert model.dtype == torch.float16
    want = make_model("llama").half().state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


def test_load_target_without_weights_or_config(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(EagleError, match="safetensors"):
        load_target(folder, torch.float32)
    (folder / "config.json").unlink()
    with pytest.raises(EagleError, match=r"config\.json"):
        load_target(folder, torch.float32)
    with pytest.raises(EagleError, match="absent"):
        load_target(tmp_path / "absent", torch.float32)


def test_load_target_in_mxfp4(tmp_path: Path) -> None:
    """As OpenAI publishes gpt-oss."""
    make_model("gpt-oss").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EagleError, match="quantised as MXFP4") as caught:
        load_target(tmp_path, torch.bfloat16)
    assert "16-bit checkpoint" in caught.value.hint


def test_load_the_language_part_of_a_model_that_sees(tmp_path: Path) -> None:
    """Its weights alone, under their own names, in either naming of the whole; not the vision tower's."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    text = KINDS["gemma3"]().config.to_dict()
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    older = load_file(file)
    assert "language_model.model.norm.weight" in older
    newer = {
        name.replace("language_model.model", "model.language_model")
        if name.startswith("language")
        else f"model.{name}": weight
        for name, weight in older.items()
    }
    ids = torch.arange(9)[None] + 20
    with torch.no_grad():
        want = whole(input_ids=ids).logits
        for tensors in (older, newer):
            save_file(tensors, file, metadata={"format": "pt"})
            model = load_target(tmp_path, torch.float32)
            assert type(model).__name__ == "Gemma3ForCausalLM"
            assert torch.equal(model(ids).logits, want)
    del older["language_model.model.norm.weight"]
    save_file(older, file, metadata={"format": "pt"})
    with pytest.raises(EagleError, match=r"lack model\.norm\.weight"):
        load_target(tmp_path, torch.float32)


@pytest.mark.parametrize("keep", [4, 200, -50])
def test_load_target_with_a_cut_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EagleError, match="whole weight files"):
        load_target(folder, torch.float32)


def test_load_target_names_tensors_that_do_not_fit(folder: Path) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    norm = tensors.pop("model.layers.1.input_layernorm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(EagleError, match=r"lack model\.layers\.1\.input_layernorm\.weight"):
        load_target(folder, torch.float32)
    save_file(tensors | {"model.layers.1.input_layernorm.weight": norm}, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(EagleError, match=r"no place for model\.layers\.2\..* and 8 more"):
        load_target(folder, torch.float32)
