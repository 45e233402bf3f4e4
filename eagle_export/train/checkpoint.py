"""Checkpoints of a run: everything that the next update depends on, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eagle_run.errors import EagleError, first_line

_VERSION = 1


def save(folder: Path, update: int, state: dict[str, Any], keep: int) -> Path:
    """Writes update-NNNNNNN.pt and removes all but the newest `keep`."""
    import torch

    path = folder / f"update-{update:07}.pt"
    temporary = folder / f"{path.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.save({"version": _VERSION, **state}, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for old in found(folder)[:-keep]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise EagleError(
            f"{path}: the checkpoint cannot be written: {first_line(error)}",
            hint="free some disk space and run again with --resume",
        ) from error
    return path


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("update-*.pt"))


def load(path: Path) -> dict[str, Any]:
    """What `save` was given. Raises EagleError for a file that is damaged or of another version."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch runs into
        raise EagleError(
            f"{path}: not a whole checkpoint: {first_line(error)}",
            hint="remove it; --resume then takes the one before",
        ) from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise EagleError(f"{path}: not a checkpoint of this version", hint="start again without --resume")
    state.pop("version")
    return state
