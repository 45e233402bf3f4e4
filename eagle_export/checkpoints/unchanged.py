"""Is a checkpoint still what it was when its export began? Sizes, times and file numbers tell."""

from __future__ import annotations

from pathlib import Path

from eagle_export.checkpoints import weights
from eagle_run.errors import EagleError

_Stamps = dict[Path, tuple[int, ...]]


class Unchanged:
    """Notes what the files of models look like now; a call raises EagleError where they look otherwise.

    models: folders, or the one file that a model is made of. linked: whether weights are to be linked, which
    may give them another number in a layered file system.
    """

    def __init__(self, *models: Path, linked: bool = False) -> None:
        self._models, self._linked = models, linked
        self._before = self._look()

    def __call__(self) -> None:
        try:
            now = self._look()
        except (EagleError, OSError) as error:
            raise self._changed(str(error)) from error
        if changed := sorted(path for path, _ in self._before.items() ^ now.items()):
            raise self._changed(f"{changed[0]} is another file than before")

    def _look(self) -> _Stamps:
        files = [file for model in self._models for file in _files(model)]
        return {file: self._stamp(file) for file in files}

    def _stamp(self, file: Path) -> tuple[int, ...]:
        stat = file.stat()
        return (stat.st_size, stat.st_mtime_ns, *(() if self._linked else (stat.st_ino,)))

    def _changed(self, what: str) -> EagleError:
        return EagleError(
            f"the weights changed while they were exported: {what}",
            hint="run the same command again once nothing writes to them",
        )


def _files(model: Path) -> list[Path]:
    return [model / "config.json", *weights.model_files(model)] if model.is_dir() else [model]
