"""Scales on disk, of whom they are, which layers are chosen, and what does not fit a 16-bit type."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_export.checkpoints.fp8_scales import DEFAULT_KEPT, Scales, choose
from eagle_run.errors import EagleError, UsageError


def test_a_file_gives_back_exactly_what_was_saved(scales: Scales, tmp_path: Path) -> None:
    scales = replace(scales, kept=("lm_head", "*.down_proj"))
    scales.save(tmp_path / "scales.json")
    assert Scales.load(tmp_path / "scales.json") == scales


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data.update(format=0), "format 1"),
        (lambda data: data.pop("inputs"), "not a file of scales"),
        (lambda data: data.update(surprise=1), "surprise"),
        (lambda data: data["inputs"]["target"].update({"model.layers.0.mlp.down_proj": 0.0}), "positive"),
        (lambda data: data["inputs"]["target"].update({"model.layers.0.mlp.down_proj": 1e-50}), "positive"),
        (lambda data: data["inputs"]["target"].update({"model.layers.0.mlp.down_proj": "0.5"}), "not a file"),
        (
            lambda data: data["inputs"]["target"].update({"model.layers.0.mlp.down_proj": 10**400}),
            "positive",
        ),
        (lambda data: data.update(peaks=[1]), "not a file of scales"),
        (lambda data: data.update(peaks={"target": float("nan")}), "not a file of scales"),
        (lambda data: data.update(tokens="many"), "not a file of scales"),
        (lambda data: data.update(source="guessed"), "guessed"),
        (lambda data: data.update(target_sha256=5), "not a file of scales"),
    ],
)
def test_a_damaged_file_is_refused(scales: Scales, tmp_path: Path, damage, named: str) -> None:
    path = tmp_path / "scales.json"
    scales.save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(EagleError, match=named):
        Scales.load(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scales.json").write_text("{")
    with pytest.raises(EagleError, match="not a file of scales"):
        Scales.load(tmp_path / "scales.json")


def test_scales_know_their_target_and_head(scales: Scales) -> None:
    scales.check_identity("a" * 64, "b" * 64)
    scales.check_identity("a" * 64, None)  # built without the head: the target's scales are as good
    with pytest.raises(EagleError, match="another target"):
        scales.check_identity("c" * 64, "b" * 64)
    with pytest.raises(EagleError, match="another head"):
        scales.check_identity("a" * 64, "c" * 64)
    with pytest.raises(EagleError, match="found none"):
        replace(scales, head_sha256=None).check_identity("a" * 64, "b" * 64)


def test_lm_head_and_fc_stay_unless_asked(scales: Scales) -> None:
    chosen = choose(scales)
    assert set(chosen.inputs) == {"target", "draft"}
    assert not {name for layers in chosen.inputs.values() for name in layers} & set(DEFAULT_KEPT)
    assert chosen.kept == DEFAULT_KEPT
    asked = choose(scales, also=("lm_head", "fc"))
    assert asked.inputs == scales.inputs
    assert asked.kept == ()


def test_patterns_choose_layers(scales: Scales) -> None:
    chosen = choose(scales, keep=("*.down_proj", "model.layers.0.*"))
    names = {name for layers in chosen.inputs.values() for name in layers}
    assert names == {
        name
        for layers in choose(scales).inputs.values()
        for name in layers
        if not name.endswith("down_proj") and not name.startswith("model.layers.0.")
    }
    assert chosen.kept == ("*.down_proj", "model.layers.0.*", *DEFAULT_KEPT)


def test_a_pattern_that_matches_nothing_says_what_there_is(scales: Scales) -> None:
    with pytest.raises(UsageError, match=r"\*\.dwn_proj") as caught:
        choose(scales, keep=("*.dwn_proj",))
    assert "model.layers.*.mlp.down_proj" in caught.value.hint
    assert "midlayer.self_attn.q_proj" in caught.value.hint


def test_nothing_left_to_quantise_is_an_error(scales: Scales) -> None:
    with pytest.raises(UsageError, match="left to quantise"):
        choose(scales, keep=("*",))


def test_activations_must_fit_the_16_bit_type(scales: Scales) -> None:
    assert scales.check_range("fp16") == []
    near = replace(scales, peaks={"target": 40000.0})
    assert "40000 at the residual stream" in near.check_range("fp16")[0]
    assert near.check_range("bf16") == []
    beyond = replace(scales, inputs={"draft": {"midlayer.mlp.down_proj": 70000 / 448}})
    with pytest.raises(EagleError, match=r"70000 at midlayer\.mlp\.down_proj"):
        beyond.check_range("fp16")
