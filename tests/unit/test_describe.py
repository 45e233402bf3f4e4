from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from bundlemaker import write_bundle
from rich.console import Console

from eagle_export.describe import describe, render, size
from eagle_run.bundle import Bundle, load_bundle


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
    written = json.loads((root / "manifest.json").read_text())
    total = sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    assert data.pop("path") == str(root)
    assert data.pop("total_bytes") == total
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
