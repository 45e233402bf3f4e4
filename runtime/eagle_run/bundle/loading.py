"""A bundle on disk: reading its manifest, and the checks that make a bad bundle fail early and clearly.

The schema is in manifest.py; docs/format.md is the prose of both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from eagle_run.bundle.engine_backends import compile_command
from eagle_run.bundle.hashing import file_sha256
from eagle_run.bundle.manifest import (
    SCHEMA_VERSION,
    Artifact,
    BackendName,
    GraphName,
    Manifest,
)
from eagle_run.bundle.records import (
    FileEntry,
    explain,
)
from eagle_run.errors import EagleError
from eagle_run.json_files import read_json

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
VOCAB_MAP_TENSOR = "draft_to_target"
_REBUILD = "build the bundle again with `eagle-export build ... --force`, or copy it again from its source"


@dataclass(frozen=True)
class Bundle:
    """A loaded, checked bundle."""

    path: Path
    manifest: Manifest

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / TOKENIZER

    def artifacts(self, graph: GraphName) -> tuple[Artifact, ...]:
        return tuple(artifact for artifact in self.manifest.artifacts if artifact.graph == graph)

    def artifact(
        self, graph: GraphName, backend: BackendName = "onnx", compute_capability: str | None = None
    ) -> Artifact:
        """The one to open: for this GPU by name, or else one that is compatible with it.

        Raises EagleError, naming what there is, when nothing fits.
        """
        mine = [artifact for artifact in self.artifacts(graph) if artifact.backend == backend]
        named = [
            a for a in mine if not a.compute_capabilities or compute_capability in a.compute_capabilities
        ]
        fitting = named or [a for a in mine if compute_capability and a.runs_on(compute_capability)]
        if fitting:
            return fitting[0]
        wanted = f"{backend} for compute capability {compute_capability}" if compute_capability else backend
        there = [
            a.backend + (f" for {' and '.join(a.compute_capabilities)}" if a.compute_capabilities else "")
            for a in self.artifacts(graph)
        ]
        command = compile_command(backend, compute_capability) if compute_capability else None
        raise EagleError(
            f"{self.path}: no {graph} graph for {wanted}; the bundle has {', '.join(there) or 'none'}",
            hint=f"compile it for this GPU: {command}" if command else "choose another backend",
        )

    def file(self, artifact: Artifact) -> Path:
        """The file a backend opens."""
        return self.path / artifact.file

    def check_unchanged(self) -> None:
        """Raises EagleError where another bundle took the place of this one: what was read may be of both."""
        if read_manifest(self.path) != self.manifest:
            raise EagleError(f"{self.path} was replaced while it was read", hint="run the command again")

    def vocab_map(self) -> torch.Tensor | None:
        """Target id of each draft id, int64 [Vd], or None when the ids are the same."""
        head = self.manifest.head
        if head is None or head.vocab_map is None:
            return None
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        where = self.path / head.vocab_map.path
        try:
            table: torch.Tensor = load_file(where)[VOCAB_MAP_TENSOR]
        except (OSError, SafetensorError, KeyError) as error:
            raise EagleError(
                f"{where}: no readable tensor {VOCAB_MAP_TENSOR!r}: {error}", hint=_REBUILD
            ) from None
        expected = f"int64 [{head.draft_vocab_size}] with ids below {self.manifest.target.vocab_size}"
        if table.dtype != torch.int64 or tuple(table.shape) != (head.draft_vocab_size,):
            raise EagleError(
                f"{where}: expected {expected}, found {table.dtype} {list(table.shape)}", hint=_REBUILD
            )
        low, high = int(table.min()), int(table.max())
        if low < 0 or high >= self.manifest.target.vocab_size:
            raise EagleError(f"{where}: expected {expected}, found ids {low}..{high}", hint=_REBUILD)
        if twice := len(table) - len(table.unique()):
            raise EagleError(
                f"{where}: expected {expected}, each once, found {twice} that repeat others", hint=_REBUILD
            )
        return table


def load_bundle(path: str | Path, *, verify_hashes: bool = True) -> Bundle:
    """Read and check a bundle.

    Every file must be there with its size. With `verify_hashes` its SHA-256 must match as well; a hash is
    computed once and remembered by path, size and modification time, so a later start costs a stat per file.
    Raises EagleError: not a bundle, corrupt or newer manifest, unknown or contradictory fields, head of
    another target, missing or edited file.
    """
    root = Path(path)
    manifest = read_manifest(root)
    for entry in manifest.files():
        _check_file(root, entry, verify_hash=verify_hashes)
    return Bundle(root, manifest)


def read_manifest(root: Path) -> Manifest:
    """The validated manifest alone; no other file is looked at."""
    where = root / MANIFEST
    if not where.is_file():
        found = "a file" if root.is_file() else "no manifest.json" if root.is_dir() else "nothing there"
        hint = "give the folder that `eagle-export build` wrote"
        if root.suffix == ".partial":
            hint = "this is what an interrupted build left behind; run the same command again to finish it"
        if not root.exists() and (aside := root.with_name(f"{root.name}.partial.old")).exists():
            hint = f"a run was killed as it replaced the bundle: the old one is {aside}, rename it back"
        raise EagleError(
            f"{root} is not a bundle: expected a folder with manifest.json, found {found}", hint=hint
        )
    data = read_json(where, hint=_REBUILD)
    _check_schema(data, where)
    if data["schema_version"] < SCHEMA_VERSION:
        data = _from_older(data)
    try:
        manifest = Manifest.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise explain(error, Manifest, str(where)) from None
    _check_head_target(manifest, where)
    return manifest


def _check_schema(data: object, where: Path) -> None:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise EagleError(
            f"{where}: expected a bundle manifest with a schema_version, found {version!r}", hint=_REBUILD
        )
    if version > SCHEMA_VERSION:
        raise EagleError(
            f"{where}: schema version {version}, but this eagle-run reads up to {SCHEMA_VERSION}",
            hint="upgrade with `pip install --upgrade eagle-export`, or build the bundle with this version",
        )


def _from_older(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew no engines, and named the one GPU of an artifact (always null). Version 2 lacked an
    `origin` of files and `settings` of the head, which mean nothing where they are left out.

    What is not shaped like a manifest is left to the validation.
    """
    first = data["schema_version"] == 1
    data = {**data, "schema_version": SCHEMA_VERSION}
    if first and isinstance(artifacts := data.get("artifacts"), list):
        data["artifacts"] = [_without(artifact, "compute_capability") for artifact in artifacts]
    return data


def _without(record: Any, key: str) -> Any:
    return {k: v for k, v in record.items() if k != key} if isinstance(record, dict) else record


def _check_head_target(manifest: Manifest, where: Path) -> None:
    head, target = manifest.head, manifest.target
    if head and head.target_sha256 != target.sha256:
        raise EagleError(
            f"{where}: the head was built for another target: expected sha256 {head.target_sha256[:12]}…, "
            f"found {target.sha256[:12]}… ({target.name})",
            hint="build target and head together with one `eagle-export build`",
        )


def _check_file(root: Path, entry: FileEntry, *, verify_hash: bool) -> None:
    where, hint = root / entry.path, _REBUILD
    if entry.origin is not None:
        hint = (
            f"it is a link to {entry.origin} of the checkpoint, so who writes to one changes the other; link "
            "or copy the checkpoint's file here again, or build the bundle again"
        )
    if not where.is_file():
        raise EagleError(f"{where}: missing, but the manifest lists it", hint=hint)
    size = where.stat().st_size
    if size != entry.bytes:
        raise EagleError(
            f"{where}: expected {entry.bytes} bytes, found {size}: truncated or edited", hint=hint
        )
    if verify_hash and (found := file_sha256(where)) != entry.sha256:
        raise EagleError(
            f"{where}: edited or corrupt: expected sha256 {entry.sha256[:12]}…, found {found[:12]}…",
            hint=hint,
        )
