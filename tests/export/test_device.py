"""Which precision "auto" is, by what the processor multiplies fast; every other test is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.datamaker import MAX_SEQ_LEN

from eagle_export.data.generator import GeneratorOptions, open_generator
from eagle_export.train.workers import autocast_type
from eagle_run.engine.offline import OfflineRequest
from eagle_run.params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["amx", "no amx"])
def has_amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    return bool(request.param)


def test_training_takes_bfloat16_where_it_is_fast(has_amx: bool) -> None:
    assert autocast_type("auto", CPU) == (torch.bfloat16 if has_amx else None)


def test_a_given_precision_holds_everywhere(has_amx: bool) -> None:
    assert autocast_type("fp32", CPU) is None
    assert autocast_type("bf16", CPU) == torch.bfloat16


def test_data_is_generated_in_bfloat16_where_it_is_fast(has_amx: bool, tiny_target: Path) -> None:
    """And in it the target still answers what it answers in float32, but for ties."""
    answers = {}
    for precision in ("", "fp32"):
        generator = open_generator(
            str(tiny_target), GeneratorOptions("cpu", precision, 2), MAX_SEQ_LEN, lambda _: None
        )
        request = OfflineRequest((3, 5, 7), SamplingParams(temperature=0, max_tokens=4))
        answers[generator.backend] = generator.run([request], lambda _: None)[0].tokens
    assert set(answers) == {f"torch {'bf16' if has_amx else 'fp32'} on cpu", "torch fp32 on cpu"}
    assert len({tokens[0] for tokens in answers.values()}) == 1
