"""Where model folders are on this machine, by identity: a bundle, which is shipped, does not tell."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from eagle_export.checkpoints import weights
from eagle_run.bundle.hashing import cache_dir, write_cache


def told(source: str) -> str:
    """What a manifest says of a source: a folder only by its name, unless it is beside a recipe."""
    path = PurePath(source)
    return path.name if path.is_absolute() or ".." in path.parts else source


def identify(model: Path) -> str:
    """Identity of a model's folder, or of the one file that it is made of. The user's cache folder remembers
    where the folder is, for `recall`."""
    sha256 = weights.identity(model)
    if model.is_dir():
        write_cache(_entry(sha256), os.fsencode(model.resolve()))
    return sha256


def recall(sha256: str) -> Path | None:
    """Where the model of this identity was last seen, if there is still one. It may be another by now."""
    try:
        folder = Path(os.fsdecode(_entry(sha256).read_bytes()))
    except OSError:
        return None
    return folder if folder.is_absolute() and (folder / "config.json").is_file() else None


def _entry(sha256: str) -> Path:
    return cache_dir("eagle-export") / "whereabouts" / sha256
