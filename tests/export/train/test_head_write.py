"""A written head is the head that is read: config.json, weights and vocabulary map."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.trainset import VOCAB, WIDTH, spec_of

from eagle_export.heads.load import load_head
from eagle_export.heads.write import head_config, write_head
from eagle_export.models.target import TargetDims
from eagle_export.train.init import random_weights
from eagle_run.errors import EagleError


def dims(layers: int = 8) -> TargetDims:
    return TargetDims(layers, WIDTH, 4, 2, 4, VOCAB, 256)


IDS = torch.tensor([*range(1, 30, 2), *range(0, 10, 2)])  # 20 ids in no order


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"feature_layers": (2, 4, 5)},  # the usual ones of 8 layers
        {"feature_layers": (3, 4, 6)},
        {"feature_layers": (0, 1, 7)},
        {"feature_layers": (7,)},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"norm_hidden_twice": True, "layers": 2},
        {"has_fc": False, "feature_layers": (8,)},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"qkv_bias": True},
        {"draft_vocab_size": VOCAB},
        {"algorithm": "eagle1"},
    ],
    ids=str,
)
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    algorithm = changes.pop("algorithm", "eagle3")
    spec = spec_of(algorithm, **changes) if algorithm == "eagle3" else spec_of("eagle1", feature_layers=(8,))
    tensors = random_weights(spec, 0)
    ids = torch.arange(VOCAB) if spec.draft_vocab_size == VOCAB else IDS
    write_head(tmp_path, spec, tensors, ids, target_layers=8, dtype=torch.float32)
    loaded = load_head(tmp_path, dims())
    assert loaded.spec == replace(spec, dialect=loaded.spec.dialect)
    assert torch.equal(loaded.draft_to_target, ids)
    assert tensors.keys() == loaded.tensors.keys()
    assert all(torch.equal(tensors[name], loaded.tensors[name]) for name in tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_layout_of_other_readers(tmp_path: Path) -> None:
    """Names, offsets and layer numbers as SpecForge, SGLang and vLLM look for them."""
    spec = spec_of(feature_layers=(2, 4, 5))
    special = {"bos_token_id": 1}
    write_head(tmp_path, spec, random_weights(spec, 0), IDS, target_layers=8, special=special)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 20
    assert config["bos_token_id"] == 1
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # of layer outputs
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(20), IDS)
    assert torch.equal(stored["t2d"].nonzero().flatten(), IDS.sort().values)
    assert stored["midlayer.self_attn.q_proj.weight"].dtype == torch.float16
    assert head_config(spec_of(), target_layers=8)["eagle_aux_hidden_state_layer_ids"] == [1, 2]


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    spec = spec_of()
    tensors = random_weights(spec, 0)
    tensors["fc.weight"][0, 0] = 1e6
    out = tmp_path / "head"
    with pytest.raises(EagleError, match=r"fc\.weight .* float16"):
        write_head(out, spec, tensors, IDS, target_layers=8)
    del tensors["fc.weight"]
    with pytest.raises(EagleError, match=r"fc\.weight"):
        write_head(out, spec, tensors, IDS, target_layers=8)
    assert not out.exists()


def test_speculators_takes_it_over(tiny_target: Path, tmp_path: Path) -> None:
    """Its converter finds all that it wants, and nothing else. It knows heads of three features only."""
    pytest.importorskip("speculators")
    from loguru import logger
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    spec = spec_of(feature_layers=(2, 4, 5))
    write_head(tmp_path / "head", spec, random_weights(spec, 0), IDS, target_layers=8)
    warnings: list[str] = []
    handler = logger.add(warnings.append, level="WARNING")
    out = tmp_path / "converted"
    Eagle3Converter().convert(tmp_path / "head", out, str(tiny_target), validate=False)
    logger.remove(handler)
    assert not warnings
    stored, theirs = load_file(tmp_path / "head/model.safetensors"), load_file(out / "model.safetensors")
    assert {name.replace("midlayer.", "layers.0.") for name in stored} == set(theirs)
    assert all(torch.equal(stored[name], theirs[name.replace("midlayer.", "layers.0.")]) for name in stored)
