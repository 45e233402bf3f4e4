"""The layer that spoils FP8 is found, and looking for it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fp8ref import PROMPTS
from support.tiny import modules_of

from eagle_export.checkpoints.fp8_scales import choose
from eagle_export.quantize.fp8.calibrate import calibrate
from eagle_export.quantize.fp8.sensitivity import by_kind, sensitivity
from eagle_run.errors import UsageError


def test_a_planted_spoiler_comes_first(tiny_target: Path) -> None:
    """One channel between up_proj and down_proj is made 10^5 times as large, and read as much smaller: the
    same function, but FP8 with one scale leaves nothing of the other channels."""
    modules = modules_of(tiny_target)
    mlp = modules.model.model.layers[1].mlp
    with torch.no_grad():
        mlp.up_proj.weight[3] *= 1e5
        mlp.down_proj.weight[:, 3] /= 1e5
    scales = choose(calibrate(modules, PROMPTS, tokens=8))
    before = {name: value.clone() for name, value in modules.model.state_dict().items()}
    told: list[tuple[int, int]] = []
    costs = sensitivity(
        modules, scales, PROMPTS, tokens=8, on_progress=lambda done, all_: told.append((done, all_))
    )
    assert len(costs) == 3 * 4
    assert told[-1] == (12, 12)
    assert {costs[0].pattern, costs[1].pattern} == {
        "model.layers.1.mlp.down_proj",  # its input is the spoiled one
        "model.layers.1.mlp.gate_proj",  # and its weight, which up_proj shares its scale with
    }
    assert costs[1].kl > 5 * costs[2].kl
    assert sum(cost.share for cost in costs) == pytest.approx(1)
    assert all(torch.equal(value, before[name]) for name, value in modules.model.state_dict().items())
    kept = choose(scales, keep=[cost.pattern for cost in costs[:2]])
    assert not {"model.layers.1.mlp.down_proj", "model.layers.1.mlp.gate_proj"} & set(kept.inputs["target"])
    kinds = by_kind(costs)
    assert {kind.pattern for kind in kinds[:2]} == {
        "model.layers.*.mlp.down_proj",
        "model.layers.*.mlp.gate_proj",
    }
    assert sum(kind.kl for kind in kinds) == pytest.approx(sum(cost.kl for cost in costs))


def test_nothing_to_look_at_is_an_error(tiny_target: Path) -> None:
    modules = modules_of(tiny_target)
    scales = calibrate(modules, PROMPTS, tokens=1)
    only_draft = replace(scales, inputs={"draft": {"midlayer.mlp.down_proj": 1.0}})
    with pytest.raises(UsageError, match="no product"):
        sensitivity(modules, only_draft, PROMPTS, tokens=1)
