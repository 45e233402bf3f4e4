"""The place where a bundle goes: may it be written there, is there room, and the final swap."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from eagle_run.bundle import MANIFEST
from eagle_run.errors import EagleError


def free_space(path: Path) -> int:
    """Bytes that are free on the disk that will hold `path`."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def check_place(path: Path, *, force: bool) -> None:
    """Raises EagleError unless a bundle may be written to `path`: free, empty, or a bundle to be replaced."""
    if path.is_file():
        raise EagleError(f"{path} is a file; expected a folder to write the bundle to")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (path / MANIFEST).is_file():
        raise EagleError(
            f"{path} holds files that are not a bundle; it is left alone",
            hint="choose another place with --out, or empty the folder yourself",
        )
    if not force:
        raise EagleError(f"{path} already holds a bundle; it is kept", hint="pass --force to replace it")


def swap(new: Path, place: Path) -> None:
    """Renames `new` to `place`; what was there is moved aside first and restored if that fails."""
    aside = place.with_name(f"{place.name}.old-{os.getpid()}")
    try:
        if place.exists():
            place.rename(aside)
        new.rename(place)
    except BaseException as error:
        if aside.exists() and not place.exists():
            aside.rename(place)
        if isinstance(error, OSError):
            raise EagleError(
                f"{place}: the finished bundle cannot be put in place: {error.strerror}"
            ) from error
        raise
    if aside.is_symlink():
        aside.unlink()  # only the link was ours to replace
    else:
        shutil.rmtree(aside, ignore_errors=True)


def disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, says that no space is left (some only in words)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
