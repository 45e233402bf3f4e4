"""The folder that a bundle goes to: may it be written, is there room, and the final swap."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from eagle_run.bundle.loading import MANIFEST
from eagle_run.errors import EagleError


def free_space(path: Path) -> int:
    """Bytes that are free on the disk that will hold `path`."""
    return shutil.disk_usage(_existing(path)).free


def check_links(files: Iterable[Path], folder: Path) -> None:
    """Raises EagleError where files cannot be linked to where `folder` will be: it is on another disk, say.

    That is tried with one file of each folder. Disks need not differ by their numbers: a folder that is bound
    into a container is as good as another disk.
    """
    probe = _existing(folder) / f".eagle-export-{os.getpid()}"
    for file in {file.resolve().parent: file for file in files}.values():
        try:
            os.link(file.resolve(), probe)
            probe.unlink()
        except OSError as error:
            raise no_link(file, folder, error) from None


def no_link(file: Path, folder: Path, error: OSError) -> EagleError:
    """What `error` says of a hard link to `file` that was to be made in `folder`."""
    why = "it is on another disk" if error.errno == errno.EXDEV else error.strerror
    return EagleError(
        f"{file} cannot be linked into {folder}: {why}",
        hint="choose a folder on the checkpoint's own disk, or have the weights copied",
        parameters=["out", "link_weights"],
    )


def check_writable(path: Path) -> None:
    """Raises EagleError where the folder that `path` goes to cannot be made or written."""
    above = _existing(path.parent)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "may not be written" if above.is_dir() else "is a file"
        raise EagleError(
            f"{path} cannot be written: {above} {why}",
            hint="choose another folder, or make that one writable",
            parameters=["out"],
        )


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def check_output_folder(path: Path, *, force: bool) -> None:
    """Raises EagleError unless a bundle may be written to `path`: free, empty, or a bundle to be replaced."""
    if path.is_file():
        raise EagleError(
            f"{path} is a file; expected a folder to write the bundle to",
            hint="choose another folder",
            parameters=["out"],
        )
    if path.is_symlink() and not path.exists():  # a folder cannot be renamed over it
        raise EagleError(
            f"{path} is a link to nothing: expected a folder, or a free name",
            hint="remove the link, or choose another folder",
            parameters=["out"],
        )
    if os.path.ismount(path):
        raise EagleError(
            f"{path} is the top of a disk: a finished bundle is renamed to its place, which cannot be there",
            hint=f"name a folder inside it, such as {path / 'bundle'}",
            parameters=["out"],
        )
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (path / MANIFEST).is_file():
        raise EagleError(
            f"{path} holds files that are not a bundle; it is left alone",
            hint="choose another folder, or empty this one yourself",
            parameters=["out"],
        )
    if not force:
        raise EagleError(
            f"{path} already holds a bundle; it is kept", hint="ask to replace it", parameters=["force"]
        )


def swap(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`; what was there is moved aside first and restored if that fails.

    One run at a time may do so for a folder; `settle` puts right what a killed one left.
    """
    aside = _aside(folder)
    try:
        if folder.exists():
            folder.rename(aside)
        new.rename(folder)
    except BaseException as error:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        if isinstance(error, OSError):
            raise EagleError(
                f"{folder}: the finished bundle cannot be put in place: {error.strerror}",
                hint="choose another folder",
                parameters=["out"],
            ) from error
        raise
    _remove(aside)


def settle(folder: Path) -> None:
    """After a run was killed in `swap`: what was at `folder` returns, or goes if the new one is there."""
    aside = _aside(folder)
    if os.path.lexists(aside) and not folder.exists():
        aside.rename(folder)
    _remove(aside)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial.old")


def _remove(aside: Path) -> None:
    """Removes what was replaced. An interrupt waits for that: nobody would do it later."""
    if not os.path.lexists(aside):
        return
    if aside.is_symlink():
        aside.unlink()  # only the link was ours to replace
        return
    try:
        shutil.rmtree(aside, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, says that no space is left (some only in words)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
