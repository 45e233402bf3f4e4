"""The unfinished folder of a bundle, NAME.partial: one run at a time, and a journal of what is finished.

A step is written to the journal when its files are whole. A later run of the same command takes finished
steps over, whatever ended the run before; a run of another command, or by other code, starts afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle_export.files import alone_in
from eagle_export.output_folder import check_output_folder, disk_full, settle, swap
from eagle_run.bundle.hashing import file_sha256, remember_sha256
from eagle_run.bundle.loading import MANIFEST
from eagle_run.errors import EagleError
from eagle_run.json_files import read_json

JOURNAL = "journal.json"
_NEXT = f"{JOURNAL}.new"  # while it is written
_FORMAT = 1


@dataclass(frozen=True)
class Step:
    """A finished step: its files with (bytes, SHA-256), what else it found, and what decided both.

    key: what the step depends on beside the identity of the whole. Plain data, as JSON gives it back.
    """

    files: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    facts: Any = None
    key: Any = None


class Partial:
    """Opens with `enter` and ends with `leave`, between which `folder` belongs to this run alone.

    identity: everything that decides the contents, as plain data; None for a run that cannot be continued.
    force: a bundle that is at `out` may be replaced.
    check: raises where what the contents are made from is no longer what it was; asked before anything is
    recorded or published. fresh: do not take anything over. note: tells the user one line.
    """

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        check: Callable[[], None] = lambda: None,
        fresh: bool = False,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = partial_folder(out)
        self._out = out
        self._identity = _plain(identity)
        self._force = force
        self._check = check
        self._fresh = fresh
        self._note = note
        self._steps: dict[str, Step] = {}
        self._taken: set[str] = set()
        self._published = False
        self._lock = contextlib.ExitStack()

    def enter(self) -> None:
        """Makes the folder, or takes it over. Raises EagleError where another run is in it, or a stranger's
        files are."""
        try:
            self._lock.enter_context(alone_in(self.folder))
        except OSError as error:
            raise EagleError(
                f"{self.folder}: cannot be made: {error.strerror}",
                hint="choose another folder",
                parameters=["out"],
            ) from None
        try:
            self._check_ours()
            settle(self._out)
            check_output_folder(self._out, force=self._force)
            self._read()
            self._tidy()
            self._write()
        except BaseException:
            self._lock.close()
            raise

    def recall(self, step: str, key: Any = None) -> Step | None:
        """A finished step of an earlier run, if its key is the same; its files are as it left them."""
        finished = self._steps.get(step)
        if finished is None or finished.key != _plain(key):
            return None
        if step not in self._taken:
            self._taken.add(step)
            self._note(f"{step}: taken over from the run before")
        return finished

    def record(self, step: str, files: Sequence[str] = (), facts: Any = None, key: Any = None) -> None:
        """Notes that `files`, relative to the folder, are whole and will not change any more."""
        self._check()
        entries = {name: _entry(self.folder / name) for name in files}
        self._steps[step] = Step(entries, _plain(facts), _plain(key))
        self._taken.add(step)
        self._write()

    def leave(self, *, keep: bool) -> bool:
        """Keeps what is finished, and says so, or removes everything; then lets other runs in.

        Where nothing is finished there is nothing to keep; returns whether there was.
        """
        with self._lock:
            if self._published:  # a folder of this name is another run's by now
                return False
            if keep and self._identity is not None and self._steps:
                self._tidy()
                with contextlib.suppress(OSError):  # a full disk; the journal is as it was
                    self._write()
                self._note(
                    f"finished parts are kept in {self.folder}: the same command goes on from there, unless "
                    "it is to start fresh; delete that folder to have the space back"
                )
                return True
            shutil.rmtree(self.folder, ignore_errors=True)
            if keep:
                self._note("nothing was finished yet, so nothing is kept")
        return False

    def publish(self, out: Path, files: Collection[str]) -> None:
        """Makes the folder the one at `out`; what was there returns if that fails.

        The journal is no part of it, nor what an earlier run finished and this one did not want, unless it
        is among `files`.
        """
        self._check()
        check_output_folder(self._out, force=self._force)  # something may have come there meanwhile
        unused = {name for step in self._steps.keys() - self._taken for name in self._steps[step].files}
        for name in unused - set(files):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / JOURNAL).unlink()
        try:
            swap(self.folder, out)
        finally:  # also where an interrupt comes in between
            self._published = not self.folder.exists()

    def _check_ours(self) -> None:
        """A folder of this name that no run made stays as it is."""
        names = {path.name for path in self.folder.iterdir()}
        if names and not names & {JOURNAL, _NEXT, MANIFEST}:
            raise EagleError(
                f"{self.folder} holds files that are not of an interrupted run; it is left alone",
                hint="move it away, or choose another folder",
                parameters=["out"],
            )

    def _read(self) -> None:
        """Finds the steps that may be taken over: of the same identity, with files that are still whole."""
        try:
            data = read_json(self.folder / JOURNAL)
            steps = {name: Step(**step) for name, step in data["steps"].items()}
            identity = data["identity"] if data["format"] == _FORMAT else None
        except (EagleError, KeyError, TypeError, AttributeError):
            return
        if self._fresh or not steps:
            return
        if self._identity is None or identity != self._identity:
            reason = ", ".join(_differences(identity, self._identity)[:3])
            self._note(f"{self.folder} is of another run ({reason}): starting afresh")
            return
        for name, step in steps.items():
            if broken := [file for file, entry in step.files.items() if not self._whole(file, entry)]:
                self._note(f"{name}: {broken[0]} has changed since; it is made again")
            else:
                self._steps[name] = step

    def _whole(self, name: str, entry: Sequence[Any]) -> bool:
        """Whether a file is what the journal says: all of it is read, for a power cut may leave zeros."""
        path = self.folder / name
        try:
            if path.stat().st_size != entry[0]:
                return False
            if path.stat().st_nlink > 1:  # a link to what was there long before
                return file_sha256(path) == entry[1]
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError:
            return False
        remember_sha256({path: digest})
        return digest == entry[1]

    def _tidy(self) -> None:
        """Removes everything that is of no finished step, such as files that are half-written."""
        owned = {JOURNAL, *(name for step in self._steps.values() for name in step.files)}
        for path in sorted(self.folder.rglob("*"), reverse=True):  # what is in a folder before the folder
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # it is not empty
                    path.rmdir()
            elif path.relative_to(self.folder).as_posix() not in owned:
                path.unlink()

    def _write(self) -> None:
        data = {
            "format": _FORMAT,
            "identity": self._identity,
            "steps": {name: asdict(step) for name, step in self._steps.items()},
        }
        whole = self.folder / _NEXT
        with whole.open("w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self.folder / JOURNAL)


def partial_folder(out: Path) -> Path:
    """Where the unfinished parts of what goes to `out` are."""
    return out.with_name(f"{out.name}.partial")


def partial_bytes(out: Path) -> int:
    """Bytes that an interrupted run left for `out`: parts of the next one, or free once it starts afresh.

    Files that are elsewhere too are not counted: theirs is no space to be had.
    """
    folder = partial_folder(out)
    if not (folder / JOURNAL).is_file():
        return 0
    stats = [path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def worth_keeping(error: BaseException | None) -> bool:
    """Whether another try may succeed after this error: not where the input itself is at fault."""
    return error is not None and (not isinstance(error, EagleError) or disk_full(error))


def _entry(path: Path) -> tuple[int, str]:
    return path.stat().st_size, file_sha256(path)


def _plain(data: Any) -> Any:
    """As JSON gives it back, so that equal data compare equal."""
    return json.loads(json.dumps(data, default=str))


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Names of what differs: "precision", "versions.torch"."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [prefix.rstrip(".") or "another command"] if old != new else []
    return [
        name
        for key in dict.fromkeys((*old, *new))
        for name in _differences(old.get(key), new.get(key), f"{prefix}{key}.")
    ]
