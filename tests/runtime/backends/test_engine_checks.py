"""What the TensorRT backend refuses before and after it loads an engine, and the kernels that it keeps."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support.tinybundle import make_bundle
from support.trtdouble import World, add_engines, double_gpu, make_library

from eagle_run.backends.kernel_cache import cache_file
from eagle_run.backends.tensorrt import load_engines
from eagle_run.bundle.loading import Bundle
from eagle_run.errors import EagleError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "tiny")


def load(bundle: Bundle, world: World, backend: Any = "tensorrt-rtx") -> Any:
    artifact = next(a for a in bundle.artifacts("target") if a.backend == backend)
    files = [(bundle.file(artifact), artifact)]
    return load_engines(make_library(world, backend), files, double_gpu(world.capability))["target"]


def test_another_gpu(root: Path) -> None:
    bundle = add_engines(root, "tensorrt-rtx", ("8.6", "8.9"))
    with pytest.raises(
        EagleError, match=r"expected a GPU of compute capability 8\.6 or 8\.9, found 12\.0"
    ) as e:
        load(bundle, World(capability="12.0"))
    assert "`eagle-export compile BUNDLE --backend tensorrt-rtx --target-arch sm120`" in e.value.hint


@pytest.mark.parametrize(
    ("level", "capability", "good"),
    [
        ("none", "9.0", False),
        ("ampere_plus", "9.0", True),
        ("ampere_plus", "12.0", True),
        ("ampere_plus", "7.5", False),
        ("same_compute_capability", "8.0", True),
        ("same_compute_capability", "8.6", False),
    ],
)
def test_hardware_compatibility(root: Path, level: str, capability: str, good: bool) -> None:
    bundle = add_engines(root, "tensorrt", ("8.0",), hardware_compatibility=level)
    world = World(capability=capability)
    if good:
        load(bundle, world, "tensorrt")
        return
    with pytest.raises(EagleError, match=r"expected a GPU of compute capability 8\.0"):
        load(bundle, world, "tensorrt")


@pytest.mark.parametrize(
    ("built", "compatible", "good"),
    [
        ("11.4.0.106", False, True),
        ("11.3.0.10", False, False),
        ("11.3.0.10", True, True),
        ("11.5.0.1", True, False),  # from the future
        ("10.15.1.29", True, False),
    ],
)
def test_versions(root: Path, built: str, compatible: bool, good: bool) -> None:
    changes = {"library_version": f"tensorrt {built}", "version_compatible": compatible}
    bundle = add_engines(root, "tensorrt", **changes)  # type: ignore[arg-type]
    if good:
        load(bundle, World(), "tensorrt")
        return
    with pytest.raises(EagleError, match=f"expected tensorrt {built}.*found tensorrt 11.4.0.106") as caught:
        load(bundle, World(), "tensorrt")
    assert "`eagle-export compile BUNDLE --backend tensorrt`" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"DOUBLE 1.6.0 8.9".ljust(64) + b"{}", "version mismatch"),
        (b"DOUBLE 1.7.1.116 12.0".ljust(64) + b"{}", "unsupported cc"),
        (b"\0" * 100, "malformed engine"),
        (b"short", "malformed engine"),
    ],
)
def test_what_the_library_sees_in_the_header(root: Path, data: bytes, reason: str) -> None:
    bundle = add_engines(root)
    (root / "engines/target.tensorrt-rtx-8.9.engine").write_bytes(data)
    with pytest.raises(EagleError, match=f"tensorrt-rtx 1.7.1.116 refuses this engine: {reason}"):
        load(bundle, World())


def test_an_engine_that_cannot_be_loaded(root: Path) -> None:
    """TensorRT has no look at the header: it logs an error and gives nothing."""
    bundle = add_engines(root, "tensorrt")
    (root / "engines/target.tensorrt-8.9.engine").write_bytes(b"\0" * 100)
    with pytest.raises(EagleError, match=r"cannot load it: .*magic tag does not match"):
        load(bundle, World(), "tensorrt")


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        ({"tensors": [["input_ids", "INPUT", "INT64", ["B", "T"]]]}, "found 1, different in features"),
        ({"aliases": {}}, "expected present_key.0 in the memory of past_key.0, found of no input"),
        ({"aliases": {"logits": "input_ids"}}, "logits in the memory of no input, found of input_ids"),
        ({"locations": {"write_index": "HOST"}}, "write_index.*DEVICE.*found .*write_index.*HOST"),
        ({"profiles": []}, "expected 3 profiles, found 0"),
    ],
)
def test_an_engine_that_is_not_the_manifests(root: Path, breaks: dict[str, Any], found: str) -> None:
    bundle = add_engines(root, breaks=breaks)
    with pytest.raises(EagleError, match=f"is not the engine in the manifest: .*{found}") as caught:
        load(bundle, World())
    assert "eagle-export compile BUNDLE" in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('["input_ids", "INPUT", "INT64"', '["input_ids", "INPUT", "INT32"', "input_ids.*INT32"),
        ('["logits", "OUTPUT"', '["logits", "INPUT"', "logits.*INPUT"),
        (
            '["features", "OUTPUT", "FLOAT", ["B", "T", 8]]',
            '["features", "OUTPUT", "FLOAT", ["B", "T", 9]]',
            "9",
        ),
        ('"logits_index": [[1, 1], [1, 1], [4, 1]]', '"logits_index": [[1, 1], [1, 1], [9, 1]]', r"9, 1"),
    ],
)
def test_tensors_and_ranges_that_differ(root: Path, old: str, new: str, found: str) -> None:
    bundle = add_engines(root)
    file = root / "engines/target.tensorrt-rtx-8.9.engine"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(EagleError, match=f"is not the engine in the manifest: .*found .*{found}"):
        load(bundle, World())


def test_kernels_are_compiled_once(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from support.trtdouble import tensors

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = add_engines(root)

    def bind_twice(world: World) -> None:
        graph = load(bundle, world)
        for rows in (2, 3):
            graph.bind(tensors(graph, T=rows, R=rows))

    first, second = World(), World()
    bind_twice(first)
    gc.collect()  # nothing uses the engine any more: its kernels are written
    (kept,) = (tmp_path / "cache/eagle-run/kernels").iterdir()
    assert kept.name.endswith(".stand-in-rtx.1.7.1.116.bin")
    bind_twice(second)
    assert (first.compiled, second.compiled) == (2, 0)


def test_a_cache_that_cannot_be_read_or_written_only_costs_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from support.trtdouble import tensors

    bundle = add_engines(root)
    artifact = bundle.artifact("target", "tensorrt-rtx", "8.9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    world = World()
    file = cache_file(artifact.files[0].sha256, double_gpu(), make_library(world))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"made by another driver")
    graph = load(bundle, world)
    graph.bind(tensors(graph))
    assert world.compiled == 1
    graph._engine.cache._save()
    assert file.read_bytes().startswith(b"1.7.1.116 8.9\n")
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    graph = load(bundle, world)
    graph.bind(tensors(graph))()
    graph._engine.cache._save()
