"""Where training starts: the layers that a head reads, its sizes, and its first weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Sizes, write_target

from eagle_export.heads.load import load_head
from eagle_export.heads.spec import expected_shapes
from eagle_export.heads.write import write_head
from eagle_export.models.target import target_dims
from eagle_export.train.init import feature_layers, new_spec, random_weights, weights_from_target
from eagle_export.train.settings import TrainSettings
from eagle_run.errors import UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaForCausalLM

    folder: Path = write_target(tmp_path_factory.mktemp("init") / "target", Sizes(layers=8))
    return LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "layers", "expected"),
    [
        ({}, 30, (2, 15, 27)),
        ({}, 8, (2, 4, 5)),
        ({}, 4, (1, 2, 3)),
        ({}, 2, (1,)),
        ({}, 1, (0,)),
        ({"features": "top"}, 30, (29,)),
        ({"algorithm": "eagle1"}, 30, (30,)),
        ({"layers": (0, 7)}, 8, (0, 7)),
    ],
)
def test_layers_that_a_head_reads(changes: dict[str, Any], layers: int, expected: tuple[int, ...]) -> None:
    assert feature_layers(TrainSettings(**changes), layers) == expected


@pytest.mark.parametrize("wrong", [(2, 1), (8,), (-1, 2), (1, 1)])
def test_wrong_layers_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="do not fit a target of 8 layers"):
        feature_layers(TrainSettings(layers=wrong), 8)


def test_a_new_head_is_like_its_target(model: Any) -> None:
    spec = new_spec(model.config, TrainSettings(), 60)
    assert (spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim) == (32, 4, 2, 8)
    assert spec.rope_theta == model.config.rope_parameters["rope_theta"]
    assert new_spec(model.config, TrainSettings(kv_heads=4), 60).kv_heads == 4
    with pytest.raises(UsageError, match="kv_heads is 3"):
        new_spec(model.config, TrainSettings(kv_heads=3), 60)


_SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5e4,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 3.0],
}


def _gemma() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, head_dim=16))


def _phi() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_SIZES, rope_parameters=_LONGROPE))


@pytest.mark.parametrize(
    ("make", "theta", "act"),
    [(_gemma, 1e6, "gelu_pytorch_tanh"), (_phi, 5e4, "silu")],
    ids=["gemma3", "phi3"],
)
def test_a_new_head_for_a_target_beyond_llama(
    make: Callable[[], Any], theta: float, act: str, tmp_path: Path
) -> None:
    """With its rotation as far as a head can have it; the final norm as that target computes it; readable."""
    model = make()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    spec, ids = new_spec(model.config, TrainSettings(), 60), torch.arange(10, 70)
    assert (spec.rope_theta, spec.rope_scaling, spec.act) == (theta, {}, act)
    tensors = weights_from_target(spec, model, ids, 0)
    feature = torch.randn(5, 32)
    rows = torch.nn.functional.rms_norm(feature, (32,), tensors["norm.weight"], spec.rms_norm_eps)
    expected = model.lm_head(model.model.norm(feature))[:, ids]
    torch.testing.assert_close(rows @ tensors["lm_head.weight"].T, expected, rtol=1e-4, atol=1e-4)
    write_head(tmp_path, spec, tensors, ids, target_layers=4, dtype=torch.float32)
    assert load_head(tmp_path, target_dims(model.config)).spec == spec


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4}, {"features": "top"}], ids=str)
def test_a_new_head_begins_by_reading_as_the_target_does(model: Any, changes: dict[str, Any]) -> None:
    spec = new_spec(model.config, TrainSettings(**changes), 60)
    ids = torch.arange(10, 70)
    tensors = weights_from_target(spec, model, ids, 0)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == expected_shapes(spec)
    assert all(x.dtype == torch.float32 for x in tensors.values())
    feature = torch.randn(5, 32)  # the same in all layers
    fused = feature.repeat(1, len(spec.feature_layers)) @ tensors["fc.weight"].T
    rows = torch.nn.functional.rms_norm(fused, (32,), tensors["norm.weight"], spec.rms_norm_eps)
    expected = model.lm_head(model.model.norm(feature))[:, ids]
    torch.testing.assert_close(rows @ tensors["lm_head.weight"].T, expected, rtol=1e-4, atol=1e-4)
    tensors["lm_head.weight"].zero_()
    assert model.lm_head.weight[ids].abs().max() > 0  # a copy


def test_a_new_eagle1_head_begins_with_the_feature(model: Any) -> None:
    spec = new_spec(model.config, TrainSettings(algorithm="eagle1"), 60)
    tensors = weights_from_target(spec, model, torch.arange(60), 0)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == expected_shapes(spec)
    assert torch.equal(tensors["fc.weight"][:, 32:], torch.eye(32))


def test_random_weights_depend_on_the_seed_alone() -> None:
    from support.trainset import spec_of

    first, again, other = (random_weights(spec_of(), seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert (first["norm.weight"] == 1).all()
