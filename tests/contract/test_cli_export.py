"""eagle-export as a user meets it: what goes to stdout and stderr, the exit code, what is left on disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.exportcli import Cli, fails, leftovers
from support.tiny import Sizes, write_head, write_target

import eagle_export.pipeline.build
from eagle_export.engines.architectures import local_capability
from eagle_run.bundle.loading import load_bundle

SMALL = ("--max-seq-len", "64", "--prefill-chunk", "16", "--max-tree-nodes", "16", "--max-batch", "2")
TREE = ("--tree", "dynamic", "--depth", "2", "--branch", "2", "--nodes", "4")


def test_the_console_script_answers() -> None:
    script = Path(sys.executable).with_name("eagle-export")
    done = subprocess.run([str(script), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("eagle-export 0.")


@pytest.mark.parametrize(
    "command",
    ["build", "compile", "export", "data", "train", "inspect", "verify", "sensitivity", "recipes", "doctor"],
)
def test_every_command_explains_itself(command: str, cli: Cli) -> None:
    outcome = cli(command, "--help")
    assert outcome.code == 0
    assert f"eagle-export {command}" in outcome.out
    assert "--debug" in outcome.out
    assert "--json" in outcome.out
    assert command in cli("--help").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bild"], ["bild"]),
        (["build"], ["--target"]),
        (["build", "--target", "smollm2"], ["smollm2-135m"]),
        (["build", "--target", "smollm2-135m", "--precision", "fp12"], ["fp32"]),
        (["build", "--target", "smollm2-135m", "--head-layer-ids", "two"], ["'two'", "(--head-layer-ids)"]),
        (["build", "--target", "smollm2-135m", "--max-seq-len", "0"], ["--max-seq-len"]),
        (["build", "--target", "smollm2-135m", "--head", "none", "--depth", "2"], ["--depth"]),
        (["build", "--target", "smollm2-135m", "--head", "none", "--layer-ids", "2"], ["--head-layer-ids"]),
        (["build", "--target", "smollm2-135m", "--top-k", "2"], ["--tree-top-k"]),  # eagle-run samples by it
        (["build", "--target", "smollm2-135m", "--frobnicate"], ["--frobnicate"]),
        (["export", "--target", "smollm2-135m"], ["--out"]),
        (["inspect"], ["BUNDLE"]),
        (["verify", "x", "--limit", "0"], ["--limit"]),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], words: list[str], cli: Cli) -> None:
    fails(cli(*arguments), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("--backend tensorrt-rtx --target-arch sm86 --precision fp8", 1, ["sm86", "Ada"]),
        ("--backend tensorrt-rtx --target-arch sm75 --precision bf16", 1, ["sm75", "bf16"]),
        ("--backend tensorrt-rtx --target-arch sm90", 2, ["Hopper", "--backend tensorrt"]),
        ("--backend tensorrt-rtx --target-arch rtx4090", 2, ["rtx4090", "sm89"]),
        ("--backend tensorrt-rtx --target-arch sm89,,sm120", 2, ["--target-arch", "commas"]),
        ("--backend tensorrt-rtx --hardware-compat ampere_plus", 2, ["--hardware-compat", "TensorRT"]),
        ("--backend tensorrt-rtx --version-compatible", 2, ["--version-compatible"]),
        ("--backend tensorrt-rtx --timing-cache t.cache", 2, ["--timing-cache"]),
        ("--backend tensorrt-rtx --profiles verify,fast", 2, ["fast", "prefill"]),
        ("--target-arch sm89", 2, ["is for engines", "(--target-arch, --backend)"]),
        ("--workspace 64", 2, ["is for engines", "(--workspace, --backend)"]),
        ("--precision fp16 --keep-16bit *.down_proj", 2, ["FP8", "fp16"]),
        ("--precision fp8 --scales a.json --calibration b.jsonl", 2, ["--scales", "--calibration"]),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_read(
    arguments: str, code: int, words: list[str], cli: Cli, tmp_path: Path
) -> None:
    command = ["build", "--target", "smollm2-135m", "--out", tmp_path / "b", *arguments.split()]
    outcome = cli(*command)
    fails(outcome, code, *words)
    assert "find the weights" not in outcome.err
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(local_capability() is not None, reason="a GPU is here: TensorRT could compile")
def test_tensorrt_without_a_gpu_says_where_to_compile(cli: Cli, tmp_path: Path) -> None:
    command = ["build", "--target", "smollm2-135m", "--backend", "tensorrt", "--out", tmp_path / "b"]
    fails(cli(*command), 1, "no NVIDIA GPU", "hint: ", "eagle-export compile")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (["--depth", "1", "--branch", "2", "--nodes", "9"], ["8 candidates", "at most 3 nodes"]),
        (["--depth", "0"], ["depth"]),
        (["--tree", "chain", "--depth", "3", "--tree-top-k", "2"], ["top_k"]),
        (["--tree", "static", "--depth", "2", "--branch", "2", "--nodes", "9"], ["at most 7"]),
        (["--depth", "9", "--branch", "10", "--nodes", "70"], ["--max-tree-nodes"]),
    ],
)
def test_a_tree_that_makes_no_sense_is_refused(
    *, tree: list[str], words: list[str], cli: Cli, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    paths = ["--target", tiny_target, "--head", tiny_head, "--out", tmp_path / "b"]
    fails(cli("build", *paths, "--max-seq-len", 64, *tree), 2, *words)
    assert leftovers(tmp_path) == []


def test_recipes_and_doctor_as_text_and_json(cli: Cli) -> None:
    table, data = cli("recipes"), cli("recipes", "--json")
    names = [recipe["name"] for recipe in json.loads(data.out)]
    assert {"smollm2-135m", "vicuna-13b", "llama3.3-70b"} <= set(names)
    assert all(name in table.out for name in names)
    checks = json.loads(cli("doctor", "--json").out)
    assert {"torch", "onnxruntime"} <= {check["name"] for check in checks}
    assert all(check["name"] in cli("doctor").out for check in checks)


def test_build_writes_a_bundle_and_keeps_it(cli: Cli, tiny_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "plain"
    command = ["build", "--target", tiny_target, "--head", "none", "--out", out, *SMALL, "--json"]
    outcome = cli(*command)
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    bundle = load_bundle(out)
    assert data["bundle"] == str(out)
    assert data["bytes"] == sum(entry.bytes for entry in bundle.manifest.files())
    assert data["peak_memory_bytes"] > 10**7
    assert {"find the weights", "identify the weights", "export target"} <= set(data["steps"])
    assert all(step in outcome.err for step in data["steps"])  # progress is for people
    assert bundle.manifest.head is None
    assert bundle.manifest.tree is None
    assert bundle.manifest.limits.max_seq_len == 64
    assert bundle.manifest.stop_token_ids == (1,)
    assert bundle.manifest.build.peak_memory_bytes > 10**7

    manifest = (out / "manifest.json").read_bytes()
    fails(cli(*command[:-1]), 1, "already holds a bundle", "--force")
    assert (out / "manifest.json").read_bytes() == manifest
    assert cli(*command, "--force").code == 0
    assert leftovers(out.parent) == ["plain"]


def test_a_built_bundle_says_what_it_is(built_bundle: Path, cli: Cli) -> None:
    manifest = load_bundle(built_bundle).manifest
    assert manifest.head is not None
    assert manifest.tree is not None
    assert manifest.head.target_sha256 == manifest.target.sha256
    assert manifest.head.feature_layers == (1, 2)
    assert (manifest.head.draft_vocab_size, manifest.target.vocab_size) == (60, 80)
    assert [artifact.graph for artifact in manifest.artifacts] == ["target", "fuse", "draft"]
    assert manifest.limits.cache_rows >= 128 + 32
    assert manifest.limits.cache_rows % 64 == 0
    text, data = cli("inspect", built_bundle), cli("inspect", built_bundle, "--json")
    assert json.loads(data.out)["tree"]["nodes"] == 10
    for word in ("dynamic", "tree_mask", "[B, 1, T, KV]", "past_key", "features", "fp32", "eagle3"):
        assert word in text.out


def test_export_writes_only_graphs(cli: Cli, tiny_target: Path, eagle1_head: Path, tmp_path: Path) -> None:
    command = ["export", "--target", tiny_target, "--head", eagle1_head, *SMALL, *TREE]
    outcome = cli(*command, "--out", tmp_path / "graphs", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["folder"] == str(tmp_path / "graphs")
    found = leftovers(tmp_path / "graphs")
    assert set(found) == set(json.loads(outcome.out)["files"])
    assert {"target.onnx", "draft.onnx"} <= set(found)
    assert not {"fuse.onnx", "vocab_map.safetensors"} & set(found)  # an EAGLE-1 head needs neither
    fails(cli(*command, "--out", tmp_path / "graphs"), 1, "left alone")
    assert leftovers(tmp_path) == ["graphs"]


def test_a_head_of_another_target_is_refused_before_anything_is_traced(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", _must_not_run)
    for name, sizes, word in (
        ("wide", Sizes(hidden=48), "hidden size 48"),
        ("wordy", Sizes(vocab=90), "vocabulary of 90"),
    ):
        other = write_target(tmp_path / name, sizes)
        head = write_head(tmp_path / f"{name}-head", other)
        out = tmp_path / "out" / "b"
        fails(cli("build", "--target", tiny_target, "--head", head, "--out", out, *SMALL, *TREE), 1, word)
        assert leftovers(out.parent) == []


def _must_not_run(*_: Any, **__: Any) -> None:
    raise AssertionError("this should not have been reached")


def test_a_target_without_a_tokenizer_is_refused_before_anything_is_traced(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_export.reference.modules.load_hollow", _must_not_run)
    target = shutil.copytree(tiny_target, tmp_path / "target", ignore=shutil.ignore_patterns("tokenizer*"))
    out = tmp_path / "out" / "b"
    fails(cli("build", "--target", target, "--head", "none", "--out", out, *SMALL), 1, "tokenizer.json")
    assert leftovers(out.parent) == []


def test_a_full_disk_is_noticed_before_the_work(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", _must_not_run)
    outcome = cli("build", "--target", tiny_target, "--head", "none", "--out", tmp_path / "b", *SMALL)
    fails(outcome, 1, "are free", "disk space")
    assert leftovers(tmp_path) == []


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors")


def _rename_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba7"}))


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_cut, "model.safetensors"),
        (_drop, "model.layers.1.mlp.up_proj.weight"),
        (_rename_family, "'mamba7'"),
        (_break_config, "config.json"),
    ],
)
def test_a_damaged_target_is_refused(
    *,
    fault: Callable[[Path], None],
    words: str,
    cli: Cli,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", _must_not_run)
    target = shutil.copytree(tiny_target, tmp_path / "target")
    fault(target)
    out = tmp_path / "out" / "b"
    fails(cli("build", "--target", target, "--head", "none", "--out", out, *SMALL), 1, words, "hint: ")
    assert leftovers(out.parent) == []


def test_the_context_is_checked_against_the_target(cli: Cli, tiny_target: Path, tmp_path: Path) -> None:
    command = ["build", "--target", tiny_target, "--head", "none", "--out", tmp_path / "b"]
    fails(cli(*command, "--max-seq-len", 999), 1, "256 positions", "use 256 or less (--max-seq-len)")


def test_a_traceback_is_shown_only_on_request(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("something nobody thought of")

    monkeypatch.setattr("eagle_export.inspection.doctor.diagnose", broken)
    fails(cli("doctor"), 1, "something nobody thought of", "--debug")
    outcome = cli("doctor", "--debug")
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert "something nobody thought of" in outcome.err
