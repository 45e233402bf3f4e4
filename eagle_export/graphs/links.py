"""Weights that stay where they are: a graph's external data in the files of a checkpoint.

ONNX wants external data in the folder of the graph. ONNX Runtime and TensorRT follow neither a path out of
it nor (ONNX Runtime) a symbolic link, but they open a second name of the same file: a hard link. It costs no
space, outlives a checkpoint that is moved or removed, and a copy of the folder elsewhere is a whole one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir

from eagle_export.checkpoints.stored import FileRange
from eagle_export.checkpoints.weight_stream import Streamed
from eagle_export.checkpoints.weights import SMALLEST_LINK
from eagle_export.output_folder import no_link
from eagle_run.bundle.hashing import file_sha256, remember_sha256


@dataclass(frozen=True)
class Links:
    """Links weights of the model folders in `names` (folder -> what its files' names begin with).

    A weight is linked where a file of such a folder holds it in the graph's type, row by row as the model
    has it. `written`: linear layers that a rewrite of the graph needs as tensors of its own.
    """

    names: Mapping[Path, str]
    written: frozenset[str] = field(default=frozenset())

    def writing(self, layers: Iterable[str]) -> Links:
        """The same, but for these linear layers, which are written."""
        return replace(self, written=frozenset(layers))

    def origin(self, name: str) -> str | None:
        """The folder and file that the link `name` is another name of; None for a file of ours."""
        for folder, prefix in self.names.items():
            if name.startswith(prefix):
                return f"{folder.name}/{name.removeprefix(prefix)}"
        return None

    def take(self, value: ir.Value) -> bool:
        """Whether an initializer stays where it is."""
        return self._file_range(value) is not None

    def external(self, value: ir.Value, folder: Path) -> ir.ExternalTensor:
        """The initializer as a reference to its file, which is linked into `folder` unless it is already."""
        stored, tensor = self._file_range(value), value.const_value
        assert stored is not None
        assert tensor is not None
        name = self.names[stored.file.parent] + stored.file.name
        link(stored.file, folder / name)
        return ir.ExternalTensor(
            name,
            stored.offset,
            stored.length,
            tensor.dtype,
            shape=tensor.shape,
            name=value.name or "",
            base_dir=folder,
        )

    def _file_range(self, value: ir.Value) -> FileRange | None:
        tensor = value.const_value
        if not isinstance(tensor, Streamed) or (value.name or "").removesuffix(".weight") in self.written:
            return None
        stored = tensor.file_range
        if stored is None or stored.length < SMALLEST_LINK or stored.file.parent not in self.names:
            return None
        return stored


def link(source: Path, name: Path) -> None:
    """A hard link to `source`. Raises EagleError where the file system has none, or is another one."""
    source = source.resolve()  # of what a cache links to, the file itself
    try:
        if name.exists():
            if name.samefile(source):
                return
            name.unlink()  # of a run before, from another checkpoint
        os.link(source, name)
        remember_sha256({name: file_sha256(source)})  # 140 GB need not be hashed again
    except OSError as error:
        raise no_link(source, name.parent, error) from error
