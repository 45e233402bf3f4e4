"""Where models are on this machine: remembered by identity, and no harm where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_export.checkpoints import whereabouts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_last_place_counts_while_a_model_is_there(cache: Path, tiny_target: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(tiny_target)
    sha256 = whereabouts.identify(moved)
    assert whereabouts.recall(sha256) == tiny_target.resolve()
    assert whereabouts.recall("0" * 64) is None
    (cache / "eagle-export" / "whereabouts" / sha256).write_text(str(tmp_path))
    assert whereabouts.recall(sha256) is None


@pytest.mark.parametrize("content", [b"", b".", b"a\0b", b"\xff\xfe"])
def test_a_damaged_entry_is_no_place(
    content: bytes, cache: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_target)  # which is no answer
    entry = cache / "eagle-export" / "whereabouts" / "abc"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(content)
    assert whereabouts.recall("abc") is None


def test_a_cache_that_cannot_be_written_is_no_fault(cache: Path, tiny_target: Path) -> None:
    cache.write_text("a file", encoding="utf-8")
    assert whereabouts.recall(whereabouts.identify(tiny_target)) is None


@pytest.mark.parametrize(
    ("source", "told"),
    [("/models/of/mine/m", "m"), ("../m", "m"), ("heads/../../m", "m"), ("heads/m", "heads/m"), ("m", "m")],
)
def test_what_a_manifest_tells_of_a_folder(source: str, told: str) -> None:
    assert whereabouts.told(source) == told
