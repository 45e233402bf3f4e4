"""Checkpoints of a run: everything that the next update depends on, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_export.files import whole_file
from eagle_run.errors import EagleError

_VERSION = 1


def save(folder: Path, update: int, state: dict[str, Any], keep: int) -> Path:
    """Writes update-NNNNNNN.pt and removes all but the newest `keep`."""
    import torch

    path = folder / f"update-{update:07}.pt"
    with whole_file(path) as temporary:
        torch.save({"version": _VERSION, **state}, temporary)
    for old in found(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("update-*.pt"))


def load(path: Path) -> dict[str, Any]:
    """What `save` was given. Raises EagleError for a file that is damaged or of another version."""
    from eagle_export.checkpoints.pickled import load_pickled

    state = load_pickled(
        path,
        ": not a whole checkpoint",
        hint="remove it, and resume from the one before",
        parameters=["resume"],
    )
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise EagleError(
            f"{path}: not a checkpoint of this version",
            hint="start anew in another folder",
            parameters=["out", "resume"],
        )
    state.pop("version")
    return state
