"""What tests of eagle-export's command line share; the fixture `cli` is in conftest.py."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

Outcome = namedtuple("Outcome", "code out err")
Cli = Callable[..., Outcome]


def fails(outcome: Outcome, code: int, *words: str) -> None:
    """An error line that holds `words` and a hint, nothing on stdout, no traceback."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert "error: " in outcome.err.lower()
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, outcome.err


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def holding(folder: Path, *words: object) -> dict[str, list[str]]:
    """The files below `folder` that hold some of `words`, anywhere in their bytes, and which."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    found = {
        name: [str(word) for word in words if str(word).encode() in content]
        for name, content in files.items()
    }
    return {name: words for name, words in found.items() if words}
