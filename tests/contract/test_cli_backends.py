"""`eagle-run` with engines: what it says where they cannot run, and what it reports where they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tinybundle import make_bundle
from support.trtdouble import World, add_engines


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_bundle(tmp_path / "tiny")
    add_engines(root, "tensorrt-rtx", ("8.9", "12.0"), precision="fp16")
    return root


def test_without_a_gpu(eagle_run: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prompt = ["--prompt", "x", "--max-new-tokens", "4"]
    result = eagle_run("generate", root, *prompt, "--backend", "tensorrt-rtx")
    assert (result.code, result.out) == (1, "")
    assert "tensorrt-rtx needs an NVIDIA GPU" in result.err
    assert "hint: " in result.err
    assert eagle_run("generate", root, *prompt, "--backend", "tensorrt", "--device", "cpu").code == 2
    assert eagle_run("generate", root, *prompt).code == 0  # auto: its ONNX graphs on the CPU


def test_bench_reports_what_ran(eagle_run: Any, root: Path, world: World, tmp_path: Path) -> None:
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text(json.dumps({"turns": ["hello there"]}) + "\n")
    bench = ["bench", root, "--dataset", dataset, "--max-new-tokens", "8"]
    here = json.loads(eagle_run(*bench).out.splitlines()[-1])
    assert (here["backend"], here["precision"]) == ("tensorrt-rtx", "fp16")
    assert here["identical_outputs"] == 1.0
    there = json.loads(eagle_run(*bench, "--device", "cpu", "--threads", "1").out.splitlines()[-1])
    assert (there["backend"], there["precision"], there["device"]) == ("onnxruntime", "fp32", "cpu")


def test_a_gpu_without_engines_is_mentioned_once(eagle_run: Any, root: Path, world: World) -> None:
    world.capability = "9.0"
    result = eagle_run("generate", root, "--prompt", "x", "--max-new-tokens", "4")
    assert result.code == 0
    assert result.err.count("engines are for compute capability 12.0, 8.9") == 1
