"""The command: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.trainset import write_npz

from eagle_export.cli.main import run

TALKS = [[(3 * n + at) % 50 + 4 for at in range(20 + n % 5)] for n in range(40)]


def test_train_prints_its_result_as_json(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_npz(tmp_path / "data.npz", TALKS, [4] * 40)
    out = tmp_path / "head"
    arguments = ["train", str(tiny_target), "--data", str(data), "--out", str(out), "--device", "cpu"]
    more = [
        "--max-updates",
        "3",
        "--steps",
        "2",
        "--draft-vocab",
        "40",
        "--batch-tokens",
        "256",
        "--layers",
        "0,2",
    ]
    assert run([*arguments, *more, "--json"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert facts["updates"] == 3
    assert facts["draft_vocab"]["size"] == 40
    assert facts["feature_layers"] == [0, 2]
    assert facts["settings"]["steps"] == 2
    assert "held out: acceptance" in printed.err
    files = {"config.json", "model.safetensors", "training.json", "curve.png", "checkpoints", "features"}
    assert {path.name for path in out.iterdir()} == files
    assert run([*arguments, *more]) == 2
    assert "already holds a training run" in capsys.readouterr().err
    assert run([*arguments, *more, "--resume"]) == 0
    assert f"{out}: 3 updates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (
            ["--layers", "a"],
            "numbers with commas between them, found 'a'\nhint: for example 2,15,27 (--layers)",
        ),
        (["--layers", "2,1"], "do not fit a target of 3 layers"),
        (["--resume"], "no checkpoint to resume"),
        (["--data", "nowhere"], "neither a data folder"),
        (["--init", "nothing"], "unknown head"),
        (["--average", "1"], "--average"),
        (
            ["--algorithm", "eagle1", "--layers", "0,1"],
            "reads the last hidden state alone\nhint: leave the layers out (--layers)",
        ),
        (["--max-length", "8"], "no answers to learn from in the first 8 tokens"),
    ],
)
def test_what_cannot_be_done_is_said(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], word: str
) -> None:
    data = write_npz(tmp_path / "data.npz", TALKS, [9] * 40)
    arguments = ["train", str(tiny_target), "--data", str(data), "--out", str(tmp_path / "head"), *extra]
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert "Traceback" not in printed.err
    assert not (tmp_path / "head").exists()


def test_no_model_is_written_over(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody's head, or the target itself, as --out."""
    data = write_npz(tmp_path / "data.npz", TALKS, [4] * 40)
    before = (tiny_target / "model.safetensors").read_bytes()
    arguments = ["train", str(tiny_target), "--data", str(data), "--out", str(tiny_target)]
    assert run(arguments) == 2
    assert "config.json, model.safetensors; it is left alone" in capsys.readouterr().err
    assert run([*arguments, "--resume"]) == 2
    assert "another folder (--out)" in capsys.readouterr().err
    assert (tiny_target / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_replaced(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_npz(tmp_path / "data.npz", TALKS, [4] * 40)
    out = tmp_path / "head"
    assert run(["train", str(tiny_target), "--data", str(data), "--out", str(out), "--device", "cuda"]) == 1
    assert "torch sees no CUDA GPU" in capsys.readouterr().err
    assert not out.exists()
