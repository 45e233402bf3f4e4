"""What an interrupted run leaves for the next one: only what is whole, and only for the same work."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bundlemaker import write_bundle
from support.bundlewriting import fill, names

from eagle_export.files import alone_in
from eagle_export.pipeline.partial import JOURNAL, Partial, partial_bytes, partial_folder
from eagle_export.pipeline.writer import BundleWriter
from eagle_run.bundle.loading import load_bundle
from eagle_run.errors import EagleError

IDENTITY = {"target": "a" * 64, "limits": {"rows": 64, "batch": (1, 2)}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def interrupted(
    place: Path,
    work: Callable[[BundleWriter], Any],
    error: BaseException | None = None,
    identity: Any = IDENTITY,
) -> list[str]:
    """Writes until `error`, as a build does; returns what the user was told."""
    told: list[str] = []
    error = error or KeyboardInterrupt()

    def attempt() -> None:
        with BundleWriter(place, force=True, identity=identity, note=told.append) as writer:
            work(writer)
            raise error

    with pytest.raises((type(error), EagleError)):
        attempt()
    return told


def one_graph(writer: BundleWriter) -> None:
    """A finished step, and half of the next."""
    writer.file("onnx/target.onnx").write_bytes(b"target")
    writer.file("onnx/deep/target.data").write_bytes(bytes(100))
    writer.journal.record("export target", ["onnx/target.onnx", "onnx/deep/target.data"], {"rows": (1, "B")})
    writer.file("onnx/draft.onnx").write_bytes(b"half of a dra")
    writer.file("tokenizer/tokenizer.json").write_text("{}")


def recalled(
    place: Path, step: str = "export target", key: Any = None, **options: Any
) -> tuple[Any, list[str]]:
    """What the next run finds, and what the user is told."""
    told: list[str] = []
    options = {"identity": IDENTITY, "note": told.append, **options}
    partial = Partial(place, **options)
    partial.enter()
    found = partial.recall(step, key)
    partial.leave(keep=True)
    return found, told


ERRORS = [
    KeyboardInterrupt(),
    ValueError("bug"),
    MemoryError(),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_the_next_run_goes_on_where_one_was_interrupted(tmp_path: Path, error: BaseException) -> None:
    told = interrupted(tmp_path / "b", one_graph, error)
    assert len(told) == 1
    assert str(tmp_path / "b.partial") in told[0]
    assert "unless it is to start fresh" in told[0]
    assert names(tmp_path) == ["b.partial"]
    files = sorted(p.relative_to(tmp_path).as_posix() for p in (tmp_path / "b.partial").rglob("*.*"))
    assert files == [  # nothing that is half-written
        f"b.partial/{JOURNAL}",
        "b.partial/onnx/deep/target.data",
        "b.partial/onnx/target.onnx",
    ]
    found, told = recalled(tmp_path / "b")
    assert found.facts == {"rows": [1, "B"]}
    assert "export target: taken over" in told[0]


def test_a_finished_run_leaves_no_journal_and_no_partial(tmp_path: Path) -> None:
    def half(writer: BundleWriter) -> None:
        one_graph(writer)
        writer.journal.record("export fuse", ["onnx/draft.onnx"])  # which the next run has no use for

    interrupted(tmp_path / "b", half)
    with BundleWriter(tmp_path / "b", identity=IDENTITY) as writer:
        assert writer.journal.recall("export target") is not None
        assert (writer.folder / "onnx/target.onnx").read_bytes() == b"target"
        writer.finish(**fill(writer))
    assert names(tmp_path) == ["b"]
    assert not (tmp_path / "b" / JOURNAL).exists()
    load_bundle(tmp_path / "b")


def test_a_step_that_is_not_wanted_any_more_is_not_published(tmp_path: Path) -> None:
    def engine(writer: BundleWriter) -> None:
        writer.file("engines/old.engine").write_bytes(b"old")
        writer.journal.record("compile for sm89", ["engines/old.engine"], key={"level": 3})

    interrupted(tmp_path / "b", engine)
    with BundleWriter(tmp_path / "b", identity=IDENTITY) as writer:
        assert writer.journal.recall("compile for sm89", {"level": 4}) is None
        writer.finish(**fill(writer))
    assert not (tmp_path / "b/engines/old.engine").exists()


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({**IDENTITY, "target": "b" * 64}, "target"),
        ({**IDENTITY, "limits": {"rows": 65, "batch": (1, 2)}}, "limits.rows"),
        (None, "another command"),
    ],
)
def test_another_command_starts_afresh(tmp_path: Path, identity: Any, reason: str) -> None:
    interrupted(tmp_path / "b", one_graph)
    found, told = recalled(tmp_path / "b", identity=identity)
    assert found is None
    assert reason in told[0]
    assert "starting afresh" in told[0]
    assert names(tmp_path) == []  # nothing of it was finished


def test_fresh_starts_over(tmp_path: Path) -> None:
    interrupted(tmp_path / "b", one_graph)
    found, _ = recalled(tmp_path / "b", fresh=True)
    assert found is None
    assert names(tmp_path) == []


def test_an_interrupt_before_anything_is_finished_leaves_nothing(tmp_path: Path) -> None:
    told = interrupted(tmp_path / "b", lambda writer: writer.file("half").write_text("h"))
    assert names(tmp_path) == []
    assert "nothing is kept" in told[0]


def test_an_error_in_the_input_leaves_nothing(tmp_path: Path) -> None:
    assert interrupted(tmp_path / "b", one_graph, EagleError("no such head")) == []
    assert names(tmp_path) == []


def test_once_the_input_is_known_to_be_good_an_error_keeps_what_is_finished(tmp_path: Path) -> None:
    def work(writer: BundleWriter) -> None:
        one_graph(writer)
        writer.keep()

    (told,) = interrupted(tmp_path / "b", work, EagleError("the compiler gave up"))
    assert "finished parts are kept" in told
    assert recalled(tmp_path / "b")[0] is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "onnx/target.onnx").write_bytes(b"TARGET"),  # of the same length
        lambda folder: (folder / "onnx/target.onnx").write_bytes(b"targ"),
        lambda folder: (folder / "onnx/deep/target.data").unlink(),
    ],
)
def test_a_file_that_is_not_as_it_was_is_made_again(tmp_path: Path, change: Any) -> None:
    """Even where length and time of the file say otherwise, as after a power cut."""
    interrupted(tmp_path / "b", one_graph)
    folder = tmp_path / "b.partial"
    stat = (folder / "onnx/target.onnx").stat()
    change(folder)
    os.utime(folder / "onnx/target.onnx", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found, told = recalled(tmp_path / "b")
    assert found is None
    assert "made again" in told[0]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 0}', '{"format": 1, "identity": 1, "steps": [3]}']
)
def test_a_damaged_journal_means_a_fresh_start(tmp_path: Path, text: str) -> None:
    interrupted(tmp_path / "b", one_graph)
    (tmp_path / "b.partial" / JOURNAL).write_text(text)
    assert recalled(tmp_path / "b")[0] is None


def test_a_killed_run_is_gone_on_from(tmp_path: Path) -> None:
    """Nothing tidied up after it: half-written files are still there, and no lock holds."""
    interrupted(tmp_path / "b", one_graph)
    (tmp_path / "b.partial/onnx/draft.onnx").write_bytes(b"half")
    (tmp_path / "b.partial" / f"{JOURNAL}.new").write_bytes(b"half")
    found, _ = recalled(tmp_path / "b")
    assert found is not None
    assert sorted(p.name for p in (tmp_path / "b.partial").rglob("*.*")) == [
        JOURNAL,
        "target.data",
        "target.onnx",
    ]


def test_one_killed_with_its_first_journal_half_written_is_started_over(tmp_path: Path) -> None:
    partial_folder(tmp_path / "b").mkdir()
    (partial_folder(tmp_path / "b") / f"{JOURNAL}.new").write_text('{"format": ')
    assert recalled(tmp_path / "b")[0] is None
    assert names(tmp_path) == []


def test_one_killed_just_before_the_end_is_started_over(tmp_path: Path) -> None:
    """Its journal was gone already, its manifest there."""
    write_bundle(tmp_path / "b.partial")
    assert recalled(tmp_path / "b")[0] is None
    assert names(tmp_path) == []


def test_a_folder_that_no_run_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "b.partial/photo.jpg").write_text("cat")
    with pytest.raises(EagleError, match="it is left alone") as caught:
        recalled(tmp_path / "b")
    assert caught.value.parameters == ("out",)
    assert (tmp_path / "b.partial/photo.jpg").read_text() == "cat"


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b", identity=IDENTITY) as writer:
        one_graph(writer)
        with pytest.raises(EagleError, match="another run is writing") as caught:
            recalled(tmp_path / "b")
        assert "wait" in caught.value.hint
        assert (writer.folder / "onnx/target.onnx").exists()
        writer.finish(**fill(writer))
    load_bundle(tmp_path / "b")


def test_a_run_that_begins_as_another_ends_keeps_its_folder(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        writer.finish(**fill(writer))
        other = Partial(tmp_path / "b", IDENTITY, force=True)
        other.enter()
    assert other.folder.is_dir()
    other.leave(keep=False)


def test_a_folder_that_was_moved_away_under_the_lock_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run opens the folder of another, which publishes it before the first one has its lock."""
    import fcntl

    (tmp_path / "b.partial").mkdir()
    lock = fcntl.flock

    def late(handle: int, flags: int) -> None:
        (tmp_path / "b.partial").rename(tmp_path / "b")
        lock(handle, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(EagleError, match="another run"), alone_in(tmp_path / "b.partial"):
        pytest.fail("entered")
    assert names(tmp_path) == ["b"]


def test_what_an_interrupted_run_left_counts_as_room(tmp_path: Path) -> None:
    place = tmp_path / "b"
    assert partial_bytes(place) == 0
    interrupted(place, one_graph)
    own = sum(path.stat().st_size for path in partial_folder(place).rglob("*.*"))
    assert partial_bytes(place) == own > 106
    os.link(partial_folder(place) / "onnx/deep/target.data", tmp_path / "elsewhere")
    assert partial_bytes(place) == own - 100
    assert json.loads((partial_folder(place) / JOURNAL).read_text())["identity"]["limits"]["batch"] == [1, 2]
