"""Files that appear whole or not at all, and folders that one run at a time writes to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_run.errors import EagleError, first_line


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it becomes `path` at the end, and is gone after any error.

    Raises EagleError for what could not be written, however the library that wrote it puts that.
    """
    from safetensors import SafetensorError

    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.chmod(0o644)  # safetensors writes for the owner alone
        temporary.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
        raise EagleError(
            f"{path} cannot be written: {first_line(error)}",
            hint="see that there is room on this disk",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes `folder` and keeps other runs out of it while this lasts; takes it away if it stayed empty.

    Raises EagleError where another run is in it, or where it cannot be a folder. (Where files cannot be
    locked, as on some network disks, nobody is kept out.)
    """
    if folder.exists() and not folder.is_dir():
        raise EagleError(
            f"{folder} is a file; expected a folder to write to", hint="choose another", parameters=["out"]
        )
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = None
    try:
        handle = _lock(folder)
        yield
    finally:
        if handle is not None:
            os.close(handle)
        if made:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _lock(folder: Path) -> int | None:
    """A handle that keeps others out until it is closed; None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = os.path.samestat(os.fstat(handle), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        alone = False
    except OSError:  # this disk knows no locks
        return handle
    if alone:
        return handle
    os.close(handle)  # locked by another run, or moved away by one that was just ending
    raise EagleError(
        f"{folder}: another run is writing to this folder",
        hint="wait for it, or choose another folder",
        parameters=["out"],
    )
