from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.bundlemaker import DRAFT_VOCAB, LAYERS, add_engines, entry, write_bundle

from eagle_run.bundle import hashing
from eagle_run.bundle.hashing import cache_dir, file_sha256
from eagle_run.bundle.loading import load_bundle
from eagle_run.bundle.manifest import graph_tensor_names
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.errors import EagleError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/eagle-run/hashes.json"


def test_a_good_bundle_loads(tmp_path: Path) -> None:
    bundle = load_bundle(write_bundle(tmp_path / "b"))
    assert bundle.manifest.target.layers == LAYERS
    target = bundle.artifact("target")
    assert bundle.file(target).read_bytes() == b"graph of target"
    assert [a.graph for a in bundle.artifacts("draft")] == ["draft"]
    assert (bundle.tokenizer_dir / "tokenizer.json").is_file()
    spec = target.spec()
    assert isinstance(spec, GraphSpec)
    assert tuple(t.name for t in spec.inputs) == graph_tensor_names("target", LAYERS)[0]
    assert spec.inputs[-1].shape == ("B", 2, 96, 8)
    table = bundle.vocab_map()
    assert table is not None
    assert table.dtype == torch.int64
    assert table.tolist() == [3 * i for i in range(DRAFT_VOCAB)]
    with pytest.raises(Exception, match="frozen"):
        bundle.manifest.name = "other"  # type: ignore[misc]


def test_a_bundle_without_a_head_loads(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data.update(head=None, tree=None, artifacts=data["artifacts"][:1])

    bundle = load_bundle(write_bundle(tmp_path / "b", edit))
    assert bundle.vocab_map() is None
    assert bundle.artifacts("draft") == ()


# --- what is not a bundle -------------------------------------------------------------------------------


def test_other_places_are_not_bundles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "b.partial").mkdir()
    for name, found in (("none", "nothing there"), ("file", "a file"), ("empty", "no manifest.json")):
        with pytest.raises(EagleError, match=f"is not a bundle.*{found}") as caught:
            load_bundle(tmp_path / name)
        assert "eagle-export build" in caught.value.hint
    with pytest.raises(EagleError) as caught:
        load_bundle(tmp_path / "b.partial")
    assert "interrupted" in caught.value.hint


@pytest.mark.parametrize("text", [b"", b'{"schema_version": 1,', b"\xff\xfe\x00", b"[" * 10])
def test_a_corrupt_manifest_is_named(tmp_path: Path, text: bytes) -> None:
    root = write_bundle(tmp_path / "b")
    (root / "manifest.json").write_bytes(text)
    with pytest.raises(EagleError, match=r"manifest\.json: not readable as JSON") as caught:
        load_bundle(root)
    assert "--force" in caught.value.hint


@pytest.mark.parametrize("version", [None, "1", True, 0, -1, 1.0])
def test_a_schema_version_must_be_a_positive_whole_number(tmp_path: Path, version: object) -> None:
    root = write_bundle(tmp_path / "b", lambda data: data.update(schema_version=version))
    with pytest.raises(EagleError, match="expected a bundle manifest with a schema_version"):
        load_bundle(root)


def test_a_newer_schema_asks_for_an_upgrade(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", lambda data: data.update(schema_version=4, novelty=[]))
    with pytest.raises(EagleError, match=r"schema version 4, but this eagle-run reads up to 3") as caught:
        load_bundle(root)
    assert "upgrade" in caught.value.hint


def test_the_first_schema_is_still_read(tmp_path: Path) -> None:
    """It had one nullable compute_capability an artifact, and no engine, quantization or accuracy."""

    def older(data: dict[str, Any]) -> None:
        data["schema_version"] = 1
        del data["quantization"], data["accuracy"]
        for artifact in data["artifacts"]:
            del artifact["engine"], artifact["compute_capabilities"]
            artifact["compute_capability"] = None

    old = load_bundle(write_bundle(tmp_path / "old", older))
    assert old.manifest == load_bundle(write_bundle(tmp_path / "new")).manifest
    for path, artifacts in (("string", "x"), ("list", ["x"]), ("none", None)):
        broken = write_bundle(
            tmp_path / path, lambda data, a=artifacts: data.update(schema_version=1, artifacts=a)
        )
        with pytest.raises(EagleError, match="artifacts"):
            load_bundle(broken)


def test_the_second_schema_is_still_read(tmp_path: Path) -> None:
    """It had no settings of a head and no origin of a file."""

    def older(data: dict[str, Any]) -> None:
        data["schema_version"] = 2
        data["head"].pop("settings", None)
        for listed in (file for artifact in data["artifacts"] for file in artifact["files"]):
            listed.pop("origin", None)

    old = load_bundle(write_bundle(tmp_path / "old", older))
    assert old.manifest == load_bundle(write_bundle(tmp_path / "new")).manifest
    assert old.manifest.schema_version == 3


def test_a_manifest_that_is_no_object(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b")
    (root / "manifest.json").write_text("[1, 2]")
    with pytest.raises(EagleError, match="found None"):
        load_bundle(root)


# --- files ----------------------------------------------------------------------------------------------

FILES = ["onnx/target.onnx", "onnx/draft.onnx.data", "tokenizer/tokenizer.json", "vocab_map.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_every_listed_file_must_be_there_and_whole(tmp_path: Path, name: str) -> None:
    root = write_bundle(tmp_path / "b")
    whole = (root / name).read_bytes()
    (root / name).unlink()
    with pytest.raises(EagleError, match=f"{name}: missing"):
        load_bundle(root, verify_hashes=False)
    (root / name).write_bytes(whole[:-1])
    with pytest.raises(EagleError, match=f"{name}: expected {len(whole)} bytes, found {len(whole) - 1}"):
        load_bundle(root, verify_hashes=False)


@pytest.mark.parametrize("name", FILES)
def test_an_edited_file_is_found_even_after_a_good_load(tmp_path: Path, name: str) -> None:
    root = write_bundle(tmp_path / "b")
    load_bundle(root)
    data = bytearray((root / name).read_bytes())
    data[-1] ^= 1
    stat = (root / name).stat()
    (root / name).write_bytes(data)
    os.utime(root / name, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(EagleError, match=f"{name}: edited or corrupt"):
        load_bundle(root)
    load_bundle(root, verify_hashes=False)


def test_a_hash_is_computed_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_bundle(tmp_path / "b")
    load_bundle(root)
    kept = json.loads(own_cache.read_text(encoding="utf-8"))
    assert len(kept) == 8
    assert kept[str((root / FILES[0]).resolve())][2] == hashlib.sha256(b"graph of target").hexdigest()

    def fail(*args: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    load_bundle(root)


def test_the_hash_of_a_file_that_changes_meanwhile_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, digest = tmp_path / "file", hashlib.file_digest
    file.write_bytes(b"before")

    def overtaken(stream: Any, name: str) -> Any:
        found = digest(stream, name)
        file.write_bytes(b"and after")
        return found

    monkeypatch.setattr(hashlib, "file_digest", overtaken)
    file_sha256(file)
    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert file_sha256(file) == hashlib.sha256(b"and after").hexdigest()


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{"])
def test_a_broken_hash_cache_is_ignored(tmp_path: Path, own_cache: Path, text: str) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(text, encoding="utf-8")
    load_bundle(write_bundle(tmp_path / "b"))
    assert len(json.loads(own_cache.read_text(encoding="utf-8"))) == 8


def test_an_unwritable_hash_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    root = write_bundle(tmp_path / "b")
    load_bundle(root)
    load_bundle(root)


def test_the_hash_cache_keeps_the_youngest(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_REMEMBERED", 2)
    for name in ("1", "2", "3"):
        (tmp_path / name).write_text(name)
        assert file_sha256(tmp_path / name) == hashlib.sha256(name.encode()).hexdigest()
    assert [Path(key).name for key in json.loads(own_cache.read_text(encoding="utf-8"))] == ["2", "3"]


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache/tool"), ("darwin", "Library/Caches/tool"), ("win32", "AppData/Local/tool")],
)
def test_caches_lie_where_the_platform_wants_them(
    platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir("tool") == Path.home() / expected


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(DRAFT_VOCAB, dtype=torch.int32), r"found torch\.int32 \[16\]"),
        (torch.zeros(DRAFT_VOCAB - 1, dtype=torch.int64), r"found torch\.int64 \[15\]"),
        (torch.arange(DRAFT_VOCAB) * 5, r"found ids 0\.\.75"),
        (torch.arange(DRAFT_VOCAB) - 1, r"found ids -1\.\.14"),
        (torch.arange(DRAFT_VOCAB) // 2, "each once, found 8 that repeat others"),
        (None, "no readable tensor 'draft_to_target'"),
    ],
)
def test_a_broken_vocabulary_map(tmp_path: Path, table: torch.Tensor | None, message: str) -> None:
    root = write_bundle(tmp_path / "b")
    where = root / "vocab_map.safetensors"
    if table is None:
        where.write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    else:
        save_file({"draft_to_target": table}, where)
    data = json.loads((root / "manifest.json").read_text())
    data["head"]["vocab_map"] = entry(root, "vocab_map.safetensors")
    (root / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(EagleError, match=message):
        load_bundle(root).vocab_map()


# --- choosing an artifact -------------------------------------------------------------------------------


def test_artifacts_are_chosen_by_backend_and_gpu(tmp_path: Path) -> None:
    root = tmp_path / "b"
    bundle = load_bundle(
        write_bundle(root, lambda data: add_engines(data, root, ("8.0",), ("8.9", "12.0"), ("9.0",)))
    )
    assert bundle.artifact("target", "tensorrt", "9.0").compute_capabilities == ("9.0",)
    for capability in ("8.9", "12.0"):  # one engine for both
        assert bundle.artifact("target", "tensorrt", capability).compute_capabilities == ("8.9", "12.0")
    assert bundle.artifact("target", "onnx", "9.0").backend == "onnx"
    assert bundle.artifact("target").backend == "onnx"
    there = r"the bundle has onnx, tensorrt for 8\.0, tensorrt for 8\.9 and 12\.0, tensorrt for 9\.0"
    for capability in ("12.1", "2.0", None):
        with pytest.raises(EagleError, match=there):
            bundle.artifact("target", "tensorrt", capability)
    with pytest.raises(EagleError, match="no draft graph for tensorrt-rtx; the bundle has onnx"):
        bundle.artifact("draft", "tensorrt-rtx")
    assert bundle.file(bundle.artifact("target", "tensorrt", "8.0")).read_bytes() == b"engine for sm80"


def test_an_engine_for_any_gpu_fits_all(tmp_path: Path) -> None:
    root = tmp_path / "b"
    bundle = load_bundle(write_bundle(root, lambda data: add_engines(data, root, ())))
    assert bundle.artifact("target", "tensorrt", "9.0") == bundle.artifact("target", "tensorrt")


# --- around it ------------------------------------------------------------------------------------------


def test_reading_a_manifest_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'onnx', 'onnxruntime', 'tokenizers', 'eagle_export'}"
    code = f"import sys, eagle_run.bundle; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
