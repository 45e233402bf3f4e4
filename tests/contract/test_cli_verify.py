"""`eagle-export inspect` and `verify` on sound, changed and broken bundles."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from exportcli import Cli, fails
from tiny import write_target

from eagle_export.verify import check_acceptance


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


def test_a_head_at_chance_is_a_warning() -> None:
    profile = {"tokens_per_round": 1.05, "acceptance_by_depth": [0.05, 0.0], "chance": 0.11}
    check = check_acceptance(profile)
    assert check.status == "warn"
    assert "another target" in check.detail
    assert check_acceptance({**profile, "acceptance_by_depth": [0.4]}).status == "ok"
    assert check_acceptance({**profile, "acceptance_by_depth": []}).status == "warn"
