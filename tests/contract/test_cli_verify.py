"""`eagle-export inspect` and `verify` on sound, changed and broken bundles."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exportcli import Cli, fails
from support.tiny import build_bundle, write_target


def test_inspect_refuses_what_is_no_sound_bundle(cli: Cli, built_bundle: Path, tmp_path: Path) -> None:
    fails(cli("inspect", tmp_path / "nothing"), 1, "not a bundle")
    edited = shutil.copytree(built_bundle, tmp_path / "edited")
    file = edited / "onnx" / "draft.onnx.data"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    fails(cli("inspect", edited), 1, "draft.onnx.data", "hint: ")
    newer = shutil.copytree(built_bundle, tmp_path / "newer")
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    fails(cli("inspect", newer), 1, "schema version 99", "upgrade")


def test_verify_proves_a_sound_bundle(cli: Cli, built_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Hello you"]}\n{"prompt": "Count to 7."}\n{"turns": ["never used"]}\n')
    command = ["verify", built_bundle, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 24]
    outcome = cli(*command, "--threads", 1, "--json")
    assert outcome.code == 0, outcome
    data = json.loads(outcome.out)
    assert data["passed"]
    checks = {check["name"]: check for check in data["checks"]}
    for name in ("target: logits", "target: features", "target: cache", "target: rows", "fuse: hidden"):
        assert 0 <= checks[name]["value"] <= 1e-3
    assert {"draft: logits", "tokens at T=0: tree", "tokens at T=0: chain"} <= set(checks)
    assert "2 of 2" in checks["tokens at T=0.8 with a seed: tree"]["detail"]
    assert data["acceptance"]["prompts"] == 2
    assert data["acceptance"]["tokens_per_round"] > 1.2
    assert "target: logits" in cli(*command, "--threads", 1).out


def test_verify_finds_another_draft(cli: Cli, built_bundle: Path, tmp_path: Path) -> None:
    """Weights that were changed together with their hash: only the comparison with the source can tell."""
    copy = shutil.copytree(built_bundle, tmp_path / "changed")
    file = copy / "onnx" / "draft.onnx.data"
    content = file.read_bytes()
    file.write_bytes(content[:-4096] + bytes(4096))
    manifest = json.loads((copy / "manifest.json").read_text())
    for artifact in manifest["artifacts"]:
        for entry in artifact["files"]:
            if entry["path"] == "onnx/draft.onnx.data":
                entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    outcome = cli("verify", copy, "--limit", 1, "--max-new-tokens", 8, "--threads", 1, "--json")
    assert outcome.code == 1
    failed = {check["name"] for check in json.loads(outcome.out)["checks"] if check["status"] == "fail"}
    assert failed
    assert all(name.startswith("draft: ") for name in failed)
    assert "error: " in outcome.err
    assert "hint: " in outcome.err


def test_verify_wants_the_weights_of_this_bundle(cli: Cli, built_bundle: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=5)
    fails(cli("verify", built_bundle, "--target", other), 1, "another target", "--target")


# --- below float32 --------------------------------------------------------------------------------------

ACCURACY = {"accuracy: top-1", "accuracy: KL", "accuracy: draft"}


@pytest.fixture(scope="module")
def narrow(tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny bundle in each precision below float32. Do not write into them."""
    folder = tmp_path_factory.mktemp("narrow")
    return {
        precision: build_bundle(
            tiny_target, tiny_head, folder / precision, precision=precision, measure=False
        )
        for precision in ("fp16", "bf16", "fp8")
    }


def checked(cli: Cli, bundle: Path, *more: object, code: int = 0) -> dict[str, dict[str, Any]]:
    command = ["verify", bundle, "--limit", 6, "--max-new-tokens", 16, "--threads", 1, "--json", *more]
    outcome = cli(*command)
    assert outcome.code == code, outcome
    return {check["name"]: check for check in json.loads(outcome.out)["checks"]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
def test_verify_tells_what_a_precision_costs(cli: Cli, narrow: dict[str, Path], precision: str) -> None:
    checks = checked(cli, narrow[precision])
    assert set(checks) >= ACCURACY | {"target: logits", "draft: logits", "fuse: hidden", "target: rows"}
    assert checks["accuracy: top-1"]["value"] >= 0.9
    assert 0 <= checks["accuracy: KL"]["value"] <= 0.01
    assert ("tokens at T=0: Transformers" in checks) is (precision != "fp8")
    assert ("modules" in checks["accuracy: top-1"]["detail"]) is (precision == "bf16")
    assert checks["target: logits"]["limit"] == 1e-3  # compared in float32
    assert "in float32" in checks["target: logits"]["detail"]


def damaged(bundle: Path, place: Path, graph: str, damage: Callable[[bytearray], None]) -> Path:
    """A copy whose weights were changed, its hashes made to fit."""
    copy = shutil.copytree(bundle, place)
    file = copy / "onnx" / f"{graph}.onnx.data"
    content = bytearray(file.read_bytes())
    damage(content)
    file.write_bytes(content)
    manifest = json.loads((copy / "manifest.json").read_text())
    for artifact in manifest["artifacts"]:
        for entry in artifact["files"]:
            if entry["path"] == f"onnx/{graph}.onnx.data":
                entry["sha256"] = hashlib.sha256(content).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def _scale_fp16(content: bytearray) -> None:
    values = np.frombuffer(content, np.float16)
    half = len(values) // 2
    values[half:] = values[half:] * np.float16(1.5)


def _shift_exponents(content: bytearray) -> None:
    """Takes the upper exponent bit of most numbers, of whatever type they are."""
    values = np.frombuffer(content, np.uint8)
    values[: len(values) // 2] &= 0b1011_1111


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "damage"), [("fp16", _scale_fp16), ("bf16", _shift_exponents), ("fp8", _shift_exponents)]
)
def test_verify_finds_damaged_weights_of_every_precision(
    cli: Cli, narrow: dict[str, Path], tmp_path: Path, precision: str, damage: Callable[[bytearray], None]
) -> None:
    checks = checked(cli, damaged(narrow[precision], tmp_path / "b", "target", damage), code=1)
    failed = {name for name, check in checks.items() if check["status"] == "fail"}
    assert {"target: logits"} <= failed
    if precision != "bf16":  # whose graphs are not what answers on a CPU
        assert {"accuracy: top-1", "accuracy: KL"} & failed
    assert not any(name.startswith(("fuse: ", "draft: ")) for name in failed)


def _with_engines(bundle: Path, place: Path, *, alone: bool) -> Path:
    """A copy with an engine beside each graph, or in its place. Nothing here can run one."""
    copy = shutil.copytree(bundle, place)
    manifest = json.loads((copy / "manifest.json").read_text())
    axis = {"min": 1, "opt": 1, "max": 4}
    engines = []
    (copy / "engines").mkdir()
    for artifact in manifest["artifacts"]:
        file = f"engines/{artifact['graph']}.tensorrt-sm90.engine"
        (copy / file).write_bytes(b"engine")
        shapes = [
            size for side in ("inputs", "outputs") for tensor in artifact[side] for size in tensor["shape"]
        ]
        axes = {size: axis for size in shapes if isinstance(size, str)}
        info = {"profiles": [{"name": "all", "axes": axes}], "attention_layers": 1, "cache_updates": 2}
        entry = {"path": file, "bytes": 6, "sha256": hashlib.sha256(b"engine").hexdigest()}
        engines.append(
            {
                **artifact,
                "backend": "tensorrt",
                "precision": "fp16",
                "file": file,
                "files": [entry],
                "compute_capabilities": ["9.0"],
                "engine": {**info, "seconds": 1.0, "peak_memory_bytes": 1},
            }
        )
    # Engines first: whoever takes the first artifact of a graph for its ONNX graph is found out.
    manifest["artifacts"] = engines if alone else [*engines, *manifest["artifacts"]]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.slow
def test_verify_takes_the_onnx_graphs_beside_engines(
    cli: Cli, built_bundle: Path, narrow: dict[str, Path], tmp_path: Path
) -> None:
    both = _with_engines(built_bundle, tmp_path / "both", alone=False)
    assert "target: logits" in checked(cli, both)
    assert not ACCURACY & set(checked(cli, both))  # the target's graph is in fp32, whatever the engines are
    both = _with_engines(narrow["fp8"], tmp_path / "fp8", alone=False)
    assert set(checked(cli, both)) >= ACCURACY
    assert "engines/target.tensorrt-sm90.engine" in cli("inspect", both).out.replace("\n", "")


def test_verify_needs_onnx_graphs(cli: Cli, built_bundle: Path, tmp_path: Path) -> None:
    alone = _with_engines(built_bundle, tmp_path / "alone", alone=True)
    fails(cli("verify", alone), 1, "no ONNX graph of the target to verify; the bundle has tensorrt", "hint: ")
