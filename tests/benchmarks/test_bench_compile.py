"""benchmarks/compile.py and what it measures on: random Llamas, the growth lines, the table of the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks` is a folder of the checkout and not installed."""
    monkeypatch.syspath_prepend(str(ROOT))


def parameters(weights: dict[str, Any]) -> int:
    return sum(torch.Size(weight.shape).numel() for weight in weights.values())


def test_sizes_are_what_they_are_called() -> None:
    from benchmarks.random_llama import SIZES, target_weights

    assert parameters(target_weights(SIZES["1b"])) == 1_235_814_400  # Llama-3.2-1B
    assert 0.29e9 < parameters(target_weights(SIZES["0.3b"])) < 0.31e9


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_random_llama_is_read_and_stays_in_range(tmp_path: Path, precision: str) -> None:
    """Its logits have a spread near 1, as the weights are scaled for; the text of any prompt has ids."""
    from transformers import AutoModelForCausalLM

    from benchmarks.random_llama import SIZES, write
    from eagle_run.tokenizer import Tokenizer

    target, _ = write(tmp_path, "tiny", precision=precision)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    ids = Tokenizer.load(target).encode_prompt("Why is the sky blue? Ünïcödé 🙂")
    assert max(ids) < SIZES["tiny"].vocab
    with torch.no_grad():
        out = model.float()(torch.tensor([ids]), output_hidden_states=True)
    assert 0.7 < float(out.logits.std()) < 1.4
    assert all(float(hidden.abs().max()) < 20 for hidden in out.hidden_states)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    from benchmarks.random_llama import write

    files = [
        [(place / "model.safetensors").read_bytes() for place in write(tmp_path / name, "tiny", seed=seed)]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert files[0] == files[1]
    assert all(same != other for same, other in zip(files[0], files[2], strict=True))


def test_a_random_head_fits_its_target(tmp_path: Path) -> None:
    from benchmarks.random_llama import SIZES, write
    from eagle_export.reference import recipe as recipes
    from eagle_export.reference.modules import load_config, load_fitting_head

    target, head = write(tmp_path, "tiny")
    found = recipes.resolve_target(str(target))
    loaded = load_fitting_head(recipes.resolve_head(str(head), found), load_config(found, 64))
    assert (loaded.spec.algorithm, loaded.spec.feature_layers) == ("eagle3", (2, 4, 5))
    assert len(loaded.draft_to_target.unique()) == SIZES["tiny"].draft_vocab


def part(size: int, **changes: float) -> dict[str, Any]:
    """What is measured of a model with `size` GB of weights; every figure grows in a line."""
    graph = {
        "seconds": 5.0 + size,
        "peak_memory_bytes": (1 + 3 * size) * 10**9,
        "bytes": (10 * size + 1) * 10**8,
        "ratio": 1.0 + 0.1 / size,
    }
    whole = {**graph, "graphs": {"target": graph}}
    return {
        "weights": {"target": size * 10**9},
        "export": {
            "seconds": 10.0 + 7 * size,
            "calibration_seconds": changes.get("calibration", 0.0) * size,
            "peak_memory_bytes": (2 + size) * 10**9,
        },
        "one": whole,
        "default": whole,
    }


def test_growth_is_a_line_through_the_models() -> None:
    from benchmarks.compile import growth

    lines = growth({"0.3b_fp16": part(1), "smollm2_fp16": part(2), "1b_fp16": part(4), "1b_fp8": part(2)})
    assert list(lines) == ["fp16"]  # one model is no line
    assert lines["fp16"]["export_seconds"] == [10.0, 7.0]
    assert lines["fp16"]["compile_memory_gb"] == [1.0, 3.0]
    assert lines["fp16"]["engine_gb"] == [0.1, 1.0]
    assert lines["fp16"]["calibration_seconds"] == [0.0, 0.0]


def test_the_table_says_what_was_measured() -> None:
    from benchmarks.compile import growth
    from benchmarks.readme_tables import compilation

    parts = {
        "0.3b_fp16": part(1),
        "1b_fp16": part(2),
        "0.3b_fp8": part(1, calibration=30),
        "1b_fp8": part(2, calibration=30),
    }
    environment = {"cores": 2, "cpu": "a processor", "tensorrt_rtx": "1.7"}
    table = compilation({"parts": parts, "growth": growth(parts), "environment": environment})
    rows = [line for line in table.splitlines() if line.startswith("| random")]
    assert (
        rows[1]
        == "| random Llama of 1.2B, fp16 | 2000 | 24 | 4.0 | 7 | 2100 (1.05×) | 7 | 2100 (1.05×) | 7.0 |"
    )
    assert "| 24 + 60 |" in rows[3]
    assert "Each GB of fp16 weights adds 7 s and 1.0 GB of memory to the export, 1 s and 3.0 GB" in table
    assert "30 s to calibration" in table


def test_a_failing_step_says_which_and_why() -> None:
    import click

    from benchmarks.compile import _step

    with pytest.raises(click.ClickException, match=r"(?s)compile nothing-here .*ended with 1.*nothing there"):
        _step("compile", "nothing-here", "--backend", "tensorrt-rtx")


@pytest.mark.real
def test_the_whole_benchmark_on_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs pip install 'eagle-export[rtx]'")
    from benchmarks.compile import main

    out = tmp_path / "compile.json"
    arguments = ["--model", "tiny", "--precision", "fp16", "--work", str(tmp_path), "--out", str(out)]
    main(arguments, standalone_mode=False)
    measured = json.loads(out.read_text())["parts"]["tiny_fp16"]
    assert set(measured["weights"]) == set(measured["one"]["graphs"]) == {"target", "fuse", "draft"}
    for name, count in (("one", 1), ("default", 3)):
        target = measured[name]["graphs"]["target"]
        assert len(target["profiles"]) == count
        assert target["ratio"] == round(target["bytes"] / measured["weights"]["target"], 3) > 1
        assert measured[name]["peak_memory_bytes"] >= target["peak_memory_bytes"] > 10**8
    assert [path.name for path in tmp_path.iterdir()] == ["compile.json"]  # nothing is left behind
