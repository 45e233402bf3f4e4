"""What a command's words alone tell to be wrong is refused before anything heavy is loaded: at once.

Imports are counted, no time is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "numpy", "matplotlib"}
RUN = """
import json, sys
from eagle_export.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]))
"""
BUILD = ("build", "--target", "smollm2-135m")
COMPILE = ("compile", "nothing-here", "--backend", "tensorrt-rtx")
TRAIN = ("train", "smollm2-135m", "--out", "new")
DATA = ("data", "smollm2-135m", "--out", "new")
REFUSED = {
    "target": (("build", "--target", "nope"), "unknown target 'nope'"),
    "head": ((*BUILD, "--head", "nope"), "unknown head 'nope'"),
    "recipe": (("build", "--target", "bad.yaml"), "bad.yaml"),
    "place": ((*BUILD, "--out", "file.txt"), "file.txt"),
    "threads": ((*BUILD, "--threads", "99999"), "threads is 99999"),
    "context": ((*BUILD, "--max-seq-len", "1"), "max_seq_len should be at least 2"),
    "tree": ((*BUILD, "--nodes", "9999"), "a tree of 9999 nodes"),
    "no head": ((*BUILD, "--head", "none", "--depth", "3"), "describes a draft tree"),
    "setting of a head": ((*BUILD, "--head-set", "x=1"), "found 'x"),
    "layers of a head": ((*BUILD, "--head-layer-ids", "a"), "found 'a'"),
    "fp8 options": ((*BUILD, "--quantize-lm-head"), "FP8"),
    "scales": ((*BUILD, "--precision", "fp8", "--scales", "none.json"), "none.json"),
    "calibration": ((*BUILD, "--precision", "fp8", "--calibration", "none.jsonl"), "none.jsonl"),
    "engine options": ((*BUILD, "--workspace", "100"), "is for engines"),
    "architecture": ((*BUILD, "--backend", "tensorrt-rtx", "--target-arch", "sm12"), "sm12"),
    "plan": ((*BUILD, "--head", "nope", "--plan"), "unknown head 'nope'"),
    "export": (("export", "--target", "nope", "--out", "new"), "unknown target 'nope'"),
    "export without a place": (("export", "--target", "smollm2-135m"), "no place"),
    "compile": (COMPILE, "is not a bundle"),
    "verify": (("verify", "nothing-here"), "is not a bundle"),
    "inspect": (("inspect", "nothing-here"), "is not a bundle"),
    "data of a target": (("data", "nope", "--self-play", "1", "--out", "new"), "unknown target 'nope'"),
    "data of nothing": (DATA, "nothing to answer"),
    "data of a file": ((*DATA, "--prompts", "none.jsonl"), "none.jsonl"),
    "data of another file": ((*DATA, "--prompts", "file.txt"), "not readable as JSON"),
    "data beside a file": ((*DATA, "--self-play", "1", "--exclude", "none.jsonl"), "none.jsonl"),
    "temperature": ((*DATA, "--self-play", "1", "--temperature", "-1"), "found '-1'"),
    "train a target": (("train", "nope", "--data", "file.txt", "--out", "new"), "unknown target 'nope'"),
    "train on nothing": ((*TRAIN, "--data", "none"), "neither a data folder nor an .npz file"),
    "layers to train": ((*TRAIN, "--data", "none", "--layers", "a"), "found 'a'"),
    "sensitivity": (("sensitivity", "--target", "nope"), "unknown target 'nope'"),
    "sensitivity to scales": (("sensitivity", "--target", "smollm2-135m", "--scales", "x.json"), "x.json"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_heavy_is_loaded(what: str, tmp_path: Path) -> None:
    arguments, words = REFUSED[what]
    (tmp_path / "file.txt").write_text("no JSON")
    (tmp_path / "bad.yaml").write_text("name: [")
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code in (1, 2)
    assert words in done.stderr
    assert not HEAVY & set(loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "file.txt"]
