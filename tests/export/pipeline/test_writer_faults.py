"""Whatever goes wrong while a bundle is written, nothing half-made stays and nothing old is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.bundlemaker import VOCAB, write_bundle
from support.bundlewriting import fill, names, spec, write

from eagle_export.pipeline.writer import BundleWriter
from eagle_run.bundle.loading import load_bundle
from eagle_run.errors import EagleError

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


ERRORS = [KeyboardInterrupt(), ValueError("bug"), EagleError("as it is"), SystemExit(3)]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("error", ERRORS)
def test_any_error_leaves_everything_as_it_was(tmp_path: Path, error: BaseException, old: bool) -> None:
    def attempt() -> None:
        with BundleWriter(tmp_path / "b", force=True) as writer:
            fill(writer)
            raise error

    if old:
        write_bundle(tmp_path / "b")
    with pytest.raises(type(error)):
        attempt()
    assert names(tmp_path) == (["b"] if old else [])
    if old:
        load_bundle(tmp_path / "b")


def raise_from(error: Exception) -> None:
    raise RuntimeError("the exporter failed") from error


@pytest.mark.parametrize(
    "fail",
    [
        lambda: raise_from(FULL),
        lambda: (_ for _ in ()).throw(FULL),
        lambda: (_ for _ in ()).throw(ValueError("I/O error: No space left on device (os error 28)")),
        lambda: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Disk quota exceeded")),
    ],
)
def test_a_full_disk_is_an_eagle_error(tmp_path: Path, fail: Any) -> None:
    def attempt() -> None:
        with BundleWriter(tmp_path / "b") as writer:
            fill(writer)
            fail()

    with pytest.raises(EagleError, match="the disk is full; nothing was kept"):
        attempt()
    assert names(tmp_path) == []


def test_leaving_without_finish_keeps_nothing(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer)
    assert names(tmp_path) == []


def test_a_manifest_that_contradicts_itself_is_not_published(tmp_path: Path) -> None:
    def attempt(change: dict[str, Any], head: dict[str, Any]) -> None:
        with BundleWriter(tmp_path / "b", force=True) as writer:
            rest = fill(writer) | change
            writer.finish(**(rest | {"head": rest["head"] | head}))

    write_bundle(tmp_path / "b")
    for change, head, message in (
        ({"tree": None}, {}, "head and tree must both be present"),
        ({"stop_token_ids": (VOCAB,)}, {}, "pass the vocabulary"),
        ({"novelty": 1}, {}, "unknown key 'novelty'"),
        ({}, {"target_sha256": "d" * 64}, "another target"),
    ):
        with pytest.raises(EagleError, match=message):
            attempt(change, head)
    assert names(tmp_path) == ["b"]
    assert (tmp_path / "b/onnx/target.onnx").read_text() == "graph of target"


def test_graphs_must_be_written_and_typed(tmp_path: Path) -> None:
    place = ("target", "onnx", "fp32", "onnx/target.onnx")
    with BundleWriter(tmp_path / "b") as writer:
        with pytest.raises(EagleError, match=r"onnx/target\.onnx: expected in the bundle"):
            writer.add_artifact(*place, spec("target"), library_version="1")
        writer.file("onnx/target.onnx").write_text("x")
        with pytest.raises(ValueError, match=r"dtype should be one of .*found 'complex64'"):
            spec("target", "complex64")
        with pytest.raises(EagleError, match=r"target graph: compute_capabilities\.0: .*found 'sm89'"):
            writer.add_artifact(*place, spec("target"), library_version="1", compute_capabilities=["sm89"])


def test_a_failed_rename_brings_the_old_bundle_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "b")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(EagleError, match="cannot be put in place: Permission denied"):
        write(tmp_path / "b", force=True)
    assert names(tmp_path) == ["b"]
    assert (load_bundle(tmp_path / "b").path / "onnx/target.onnx").read_text() == "graph of target"


def test_an_interrupt_while_the_old_bundle_goes_leaves_the_new_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "b")
    real, interrupts = shutil.rmtree, [KeyboardInterrupt()]

    def rmtree(path: Path, **options: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "b", mark="!", force=True)
    assert names(tmp_path) == ["b"]
    assert (load_bundle(tmp_path / "b").path / "onnx/target.onnx").read_text() == "target!"


@pytest.mark.parametrize("moment", ["before the new one", "after it"])
def test_a_run_that_was_killed_as_it_replaced_a_bundle_is_put_right(tmp_path: Path, moment: str) -> None:
    """The next run finds the old bundle aside: it returns if its place is free, and goes if not."""
    write_bundle(tmp_path / "b")
    if moment == "before the new one":
        (tmp_path / "b").rename(tmp_path / "b.partial.old")
    else:
        shutil.copytree(tmp_path / "b", tmp_path / "b.partial.old")
    with BundleWriter(tmp_path / "b", force=True):
        assert names(tmp_path) == ["b", "b.partial"]
    assert names(tmp_path) == ["b"]
    assert (load_bundle(tmp_path / "b").path / "onnx/target.onnx").read_text() == "graph of target"


def test_an_edit_between_hashing_and_finishing_is_caught(tmp_path: Path) -> None:
    def attempt() -> None:
        with BundleWriter(tmp_path / "b") as writer:
            rest = fill(writer)
            path = writer.folder / "onnx/draft.onnx"
            path.write_text("tfard")
            os.utime(path, ns=(0, 0))
            writer.finish(**rest)

    with pytest.raises(EagleError, match="edited or corrupt"):
        attempt()
    assert names(tmp_path) == []


def come(place: Path, what: str) -> None:
    """Something comes to a place where there was nothing."""
    if what == "bundle":
        write(place, "theirs")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("mine")


@pytest.mark.parametrize("what", ["bundle", "files"])
@pytest.mark.parametrize("force", [False, True])
def test_what_came_to_the_place_meanwhile_is_kept(tmp_path: Path, *, what: str, force: bool) -> None:
    """A build takes minutes; only a bundle goes, and only with force."""
    place, aside = tmp_path / "b", tmp_path / "c"
    come(aside, what)
    before = names(aside)
    replaces = what == "bundle" and force
    refused = contextlib.nullcontext() if replaces else pytest.raises(EagleError, match=r"is kept|left alone")
    with refused, BundleWriter(place, force=force, identity={"a": 1}) as writer:
        fields = fill(writer, "ours")
        writer.journal.record("export target", ["onnx/target.onnx"])
        writer.keep()
        aside.rename(place)
        writer.finish(**fields)
    if replaces:
        assert names(tmp_path) == ["b"]
        assert (place / "onnx/target.onnx").read_text() == "targetours"
        return
    assert names(place) == before
    assert names(tmp_path) == ["b", "b.partial"]
    place.rename(aside)
    with BundleWriter(place, identity={"a": 1}) as writer:
        assert writer.journal.recall("export target") is not None
        writer.finish(**fill(writer, "ours"))
    assert names(tmp_path) == ["b", "c"]


def test_a_bundle_that_comes_back_from_a_killed_run_is_replaced_with_force_alone(tmp_path: Path) -> None:
    write(tmp_path / "b", "old")
    (tmp_path / "b").rename(tmp_path / "b.partial.old")
    with pytest.raises(EagleError, match=r"the old one is .*b\.partial\.old, rename it back"):
        load_bundle(tmp_path / "b")
    with pytest.raises(EagleError, match="already holds a bundle"):
        write(tmp_path / "b", "new")
    assert names(tmp_path) == ["b"]
    assert (tmp_path / "b/onnx/target.onnx").read_text() == "targetold"
    write(tmp_path / "b", "new", force=True)
    assert (tmp_path / "b/onnx/target.onnx").read_text() == "targetnew"


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="a disk of Linux")
def test_the_top_of_a_disk_is_refused_before_anything_is_written() -> None:
    """A folder can be renamed neither to it nor away from it: found after the whole build otherwise."""
    with pytest.raises(EagleError, match=r"/proc is the top of a disk(.|\n)*such as /proc/bundle"):
        BundleWriter("/proc").__enter__()


def test_a_bundle_that_is_replaced_while_it_is_copied_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "b", "old")
    old = load_bundle(tmp_path / "b")
    write(tmp_path / "b", "new", force=True)
    refused = pytest.raises(EagleError, match="b was replaced while it was read")
    with refused, BundleWriter(tmp_path / "c") as writer:
        writer.adopt(old)
    assert names(tmp_path) == ["b"]


def test_a_disk_so_full_that_not_even_the_journal_can_be_written_keeps_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    refused = pytest.raises(EagleError, match="the disk is full; what was finished was kept")
    with refused, BundleWriter(tmp_path / "b", identity={"a": 1}) as writer:
        writer.file("onnx/target.onnx").write_bytes(b"target")
        writer.journal.record("export target", ["onnx/target.onnx"])
        monkeypatch.setattr(os, "fsync", full)
        writer.journal.record("export fuse")
    monkeypatch.undo()
    with BundleWriter(tmp_path / "b", identity={"a": 1}) as writer:
        assert writer.journal.recall("export target") is not None
