from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.bundlemaker import ACCURACY, QUANTIZATION, add_engines, engine, write_bundle

from eagle_export.inspection.describe import describe, render, size
from eagle_run.bundle.loading import Bundle, load_bundle, read_manifest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def shown(bundle: Bundle) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(describe(bundle)))
    return console.export_text()


def test_the_description_is_the_manifest_and_sizes(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b")
    data = json.loads(json.dumps(describe(load_bundle(root))))
    written = read_manifest(root).model_dump(mode="json")
    total = sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    assert data.pop("path") == str(root)
    assert data.pop("total_bytes") == total
    assert data.pop("linked_bytes") == 0
    for artifact in data["artifacts"]:
        assert artifact.pop("bytes") == sum(entry["bytes"] for entry in artifact["files"])
    assert data == written


def test_people_see_graphs_tensors_head_tree_and_limits(tmp_path: Path) -> None:
    text = shown(load_bundle(write_bundle(tmp_path / "b")))
    for part in (
        "tiny-target (llama) from org/tiny",
        "2 layers, hidden 16, 2/2 heads of 8, vocabulary 64",
        "eagle3 (safeai) from org/tiny-head",
        "features 0 1 2",
        "dynamic, depth 2, top_k 2, 4 nodes (root included)",
        "max_seq_len 64, max_batch 2",
        "stops at",
        "2 63",
        "onnx/draft.onnx",
        "onnx 1.23.2, opset 24",
        "fp32",
        "tree_mask",
        "past_key.{0..1}",  # caches of all layers, all alike, in one line
        "[B, 2, 96, 8]",
        "hidden_out",
        "torch 2.13.0",
    ):
        assert part in text, part
    assert "past_key.1 " not in text
    assert "read with" not in text


def test_how_a_head_was_read_is_shown(tmp_path: Path) -> None:
    def said(data: dict[str, Any]) -> None:
        data["head"]["settings"] = ["norm_output=false", "rope_theta=10000"]

    assert "read with norm_output=false, rope_theta=10000" in shown(load_bundle(write_bundle(tmp_path, said)))


def test_bundles_without_a_head_and_with_a_static_tree(tmp_path: Path) -> None:
    def plain(data: dict[str, Any]) -> None:
        data.update(head=None, tree=None, artifacts=data["artifacts"][:1], stop_token_ids=[])

    text = shown(load_bundle(write_bundle(tmp_path / "plain", plain)))
    assert "none: plain decoding only" in text
    assert "nothing" in text

    def static(data: dict[str, Any]) -> None:
        data["tree"] = {"kind": "static", "depth": 1, "top_k": 2, "nodes": 3, "parents": [-1, 0, 0]}

    text = shown(load_bundle(write_bundle(tmp_path / "static", static)))
    assert "parents -1 0 0" in text


def _engines(root: Path, **changes: Any) -> Bundle:
    return load_bundle(write_bundle(root, lambda data: add_engines(data, root, ("8.9", "12.0"), **changes)))


def test_engines_show_what_the_compiler_made_of_them(tmp_path: Path) -> None:
    text = shown(_engines(tmp_path / "b"))
    row = next(line for line in text.splitlines() if "engines/target" in line)
    for part in ("tensorrt", "fp8", "tensorrt 11.4.0", "8.9 12.0", "21 bytes"):
        assert part in row, part
    onnx = next(line for line in text.splitlines() if "onnx/target.onnx" in line)
    assert " any " in onnx
    head = "target (tensorrt for 8.9 12.0): 2 attention layers, 4 cache updates"
    assert f"{head}, compiled in 12 s with 1.4 GB" in text
    verify = next(line for line in text.splitlines() if " verify " in line)
    for part in ("1..2 (1)", "1..64 (16)", "402", "2 _gemm_mha_v2", "8 fp8, 1 fp16", "10 MB"):
        assert part in verify, part
    plain = next(line for line in text.splitlines() if " plain " in line)
    assert "not told" in plain
    assert " 1 " in plain
    assert "compatib" not in text


def test_artifacts_with_the_same_tensors_share_a_table(tmp_path: Path) -> None:
    text = shown(_engines(tmp_path / "b"))
    assert "target (onnx, tensorrt)" in text
    assert text.count("past_key.{0..1}") == 1

    def edit(data: dict[str, Any]) -> None:
        add_engines(data, root, ("8.9",))
        last = data["artifacts"][-1]
        last["outputs"] = [{**tensor, "dtype": "float16"} for tensor in last["outputs"]]

    root = tmp_path / "other"
    text = shown(load_bundle(write_bundle(root, edit)))
    assert "target (onnx)" in text
    assert "target (tensorrt)" in text
    assert text.count("past_key.{0..1}") == 2


def test_what_an_engine_may_also_run_on_is_told(tmp_path: Path) -> None:
    info = {**engine(), "hardware_compatibility": "ampere_plus", "version_compatible": True}
    text = shown(_engines(tmp_path / "b", engine=info))
    assert ", hardware compatibility ampere_plus, version compatible" in text


def test_quantisation_and_accuracy_are_in_the_summary(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data.update(accuracy=ACCURACY, quantization=QUANTIZATION)

    text = shown(load_bundle(write_bundle(tmp_path / "b", edit)))
    for part in (
        "210 linear layers in FP8, scales calibrated on 900 tokens; kept in fp16: lm_head",
        "92.2% of the most likely tokens are float32's, KL 0.037 nats",
        "perplexity 4.25 (float32: 4.12)",
        "1.68 tokens per round (float32: 1.74)",
        "over 1200 tokens of 24 prompts and answers, in ONNX Runtime",
    ):
        assert part in text, part

    def plain(data: dict[str, Any]) -> None:
        data["accuracy"] = {**ACCURACY, "tokens_per_round": None, "reference_tokens_per_round": None}
        data["accuracy"]["backend"] = "eager"
        data["quantization"] = {**QUANTIZATION, "source": "modelopt", "tokens": 0, "kept": []}

    text = shown(load_bundle(write_bundle(tmp_path / "plain", plain)))
    assert "tokens per round" not in text
    assert "in PyTorch" in text
    assert "scales as the modelopt checkpoint has them; kept in fp16: none" in text
    assert "quantised" not in shown(load_bundle(write_bundle(tmp_path / "none")))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (12_300, "12 kB"),
        (269_000_000, "269 MB"),
        (1_500_000_000, "1.5 GB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text
