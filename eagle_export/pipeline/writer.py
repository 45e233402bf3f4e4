"""Writes a bundle into an unfinished folder beside its place, then renames: nothing is ever half-made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from eagle_export.checkpoints.whereabouts import told
from eagle_export.output_folder import disk_full
from eagle_export.pipeline.partial import Partial, worth_keeping
from eagle_run.bundle.hashing import file_sha256, remember_sha256
from eagle_run.bundle.loading import MANIFEST, TOKENIZER, VOCAB_MAP_TENSOR, Bundle, load_bundle
from eagle_run.bundle.manifest import SCHEMA_VERSION, Artifact, BackendName, GraphName, Manifest
from eagle_run.bundle.records import EngineInfo, FileEntry, explain
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.errors import EagleError, UsageError, first_line
from eagle_run.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_PROBE = "Hello, wörld!\n\n1. 2 + 2 = 4 🙂"


class BundleWriter:
    """Context manager that collects the parts of a bundle in `folder` and publishes them in `finish`.

        with BundleWriter(out, force=force) as writer:
            export_target(writer.file("onnx/target.onnx"))
            writer.add_artifact("target", "onnx", "fp32", "onnx/target.onnx", spec, ...)
            writer.copy_tokenizer(model_folder)
            bundle = writer.finish(target=..., head=..., ...)

    Leaving without `finish`, by an error or Ctrl-C, keeps what was at `path` before and removes everything
    that was written; but steps that are in the `journal` stay for the next run after an interrupt, a fault of
    the system or, once `keep` was called, any error. A full disk becomes an EagleError.

    identity: everything that decides the contents; None for a bundle whose making cannot be continued.
    check: raises where the sources of the bundle have changed since. fresh: do not go on where an earlier
    run ended. note: tells the user one line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        force: bool = False,
        identity: Mapping[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
        fresh: bool = False,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = Path(os.path.normpath(path))
        if self.path.name in ("", ".."):
            raise UsageError(
                f"{path} cannot become a bundle's folder", hint="name a new folder", parameters=["out"]
            )
        self.journal = Partial(self.path, identity, force=force, check=check, fresh=fresh, note=note)
        self.folder = self.journal.folder
        self._keep = False
        self._artifacts: list[Artifact] = []
        self._tokenizer: list[FileEntry] = []

    def __enter__(self) -> BundleWriter:
        self.journal.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self.journal.leave(keep=worth_keeping(error) or (self._keep and error is not None))
        if error is not None and disk_full(error):
            raise EagleError(
                f"{self.path}: the disk is full; {'what was finished' if kept else 'nothing'} was kept",
                hint="free some disk space, or choose another folder",
                parameters=["out"],
            ) from error

    def keep(self) -> None:
        """From here on, what is in the journal stays also after an error."""
        self._keep = True

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """What was added so far."""
        return tuple(self._artifacts)

    def file(self, relative: str) -> Path:
        """Where to write the file `relative` of the bundle; its folder exists."""
        path = self.folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def entry(self, relative: str, origin: str | None = None) -> FileEntry:
        """Size and hash of a file that is written and will not change any more."""
        path = self.folder / relative
        if not path.is_file():
            raise EagleError(f"{relative}: expected in the bundle being written, but nothing wrote it")
        return FileEntry(path=relative, bytes=path.stat().st_size, sha256=file_sha256(path), origin=origin)

    def add_artifact(
        self,
        graph: GraphName,
        backend: BackendName,
        precision: str,
        file: str,
        spec: GraphSpec,
        *,
        extra_files: Mapping[str, str | None] = MappingProxyType({}),
        opset: int | None = None,
        library_version: str,
        compute_capabilities: Sequence[str] = (),
        engine: EngineInfo | None = None,
    ) -> Artifact:
        """Registers a finished graph: `file` is what a backend opens, `extra_files` its external data,
        with the origin of those that are links (see `FileEntry`).

        Both are relative to the bundle. Hashes are computed here. Raises EagleError when a file is missing or
        the signature is not of the contract's types.
        """
        try:
            artifact = Artifact(
                graph=graph,
                backend=backend,
                precision=precision,
                file=file,
                files=(self.entry(file), *(self.entry(*extra) for extra in extra_files.items())),
                opset=opset,
                library_version=library_version,
                compute_capabilities=tuple(compute_capabilities),
                engine=engine,
                inputs=spec.inputs,
                outputs=spec.outputs,
            )
        except ValidationError as error:
            raise explain(error, Artifact, f"{graph} graph") from None
        self._artifacts.append(artifact)
        return artifact

    def adopt(self, bundle: Bundle, *, without: Callable[[Artifact], bool] = lambda _: False) -> None:
        """Takes over the files of a finished bundle, except the artifacts that `without` is true for.

        A user's own files beside them come along when the bundle is being replaced.

        A bundle that is being replaced is linked where the disk allows it, and so are files that were links
        already; anything else is copied. Raises
        EagleError when it cannot be read.
        """
        kept = [artifact for artifact in bundle.manifest.artifacts if not without(artifact)]
        dropped = {e.path for a in bundle.manifest.artifacts if without(a) for e in a.files}
        dropped -= {entry.path for artifact in kept for entry in artifact.files}
        replaced = bundle.path.resolve() == self.path.resolve()
        names = {entry.path for entry in bundle.manifest.files()} - dropped
        if replaced:
            shutil.copymode(bundle.path, self.folder)
            present = (path for path in bundle.path.rglob("*") if path.is_file())
            names |= {str(path.relative_to(bundle.path)) for path in present} - dropped - {MANIFEST}
        linked = {entry.path for entry in bundle.manifest.files() if entry.origin is not None}
        for name in sorted(names):
            copy, link = self.file(name), replaced or name in linked
            copy.unlink(missing_ok=True)  # of a run before
            try:
                (os.link if link else shutil.copyfile)(bundle.path / name, copy)
            except OSError as error:
                if disk_full(error) or not link:
                    raise
                shutil.copyfile(bundle.path / name, copy)  # a file system without links
        bundle.check_unchanged()
        known = {entry.path: entry.sha256 for entry in bundle.manifest.files()}
        remember_sha256({self.folder / name: known[name] for name in names if name in known})
        self._artifacts = kept
        self._tokenizer = list(bundle.manifest.tokenizer)

    def copy_tokenizer(self, model_folder: Path) -> None:
        """The tokenizer, chat template and generation config of a model folder, as the runtime reads them.

        Transformers writes them, so that what it would do to the files on loading is done, and a slow
        tokenizer becomes a fast one. Raises EagleError when there is none, or none that is fast.
        """
        from transformers import AutoTokenizer

        target = self.folder / TOKENIZER
        try:
            tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
            tokenizer.save_pretrained(target)
        except Exception as error:
            if disk_full(error):
                raise
            hint = "the folder must hold tokenizer.json (or tokenizer.model) and tokenizer_config.json"
            if (model_folder / "tokenizer.model").is_file() and not (
                model_folder / "tokenizer.json"
            ).is_file():
                hint = "run `pip install sentencepiece`, which tokenizer.model needs, or add a tokenizer.json"
            raise EagleError(
                f"{model_folder}: no readable tokenizer: {first_line(error)}", hint=hint
            ) from error
        generation = model_folder / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, target / generation.name)
        for path in sorted(target.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in _TOKENIZER_FILES:  # vocabularies of slow tokenizers; nothing reads them
                path.unlink()
        found, expected = Tokenizer.load(target).encode(_PROBE), tokenizer(_PROBE).input_ids
        if found != expected:
            raise EagleError(
                f"{model_folder}: the saved tokenizer gives {found} for {_PROBE!r}, Transformers {expected}",
                hint=f"tokenizers of class {type(tokenizer).__name__} are not supported",
            )
        names = sorted(path.name for path in target.iterdir())
        self._tokenizer = [self.entry(f"{TOKENIZER}/{name}") for name in names]

    def write_vocab_map(self, draft_to_target: torch.Tensor) -> FileEntry:
        """Target id of each draft id, int64 [Vd], for HeadInfo.vocab_map."""
        from safetensors.torch import save_file

        relative = "vocab_map.safetensors"
        path = self.file(relative)
        save_file({VOCAB_MAP_TENSOR: draft_to_target.long().contiguous()}, path)
        path.chmod(0o644)  # safetensors writes for the owner alone; a bundle is for everyone who may see it
        return self.entry(relative)

    def finish_like(self, manifest: Manifest) -> Bundle:
        """`finish` with everything of an adopted bundle's manifest that is not the writer's own."""
        own = {"schema_version", "name", "created", "tool_version", "tokenizer", "artifacts"}
        fields = {name: getattr(manifest, name) for name in Manifest.model_fields if name not in own}
        for part in ("target", "head"):  # manifests once had the folders of the machine that built them
            if (info := fields[part]) is not None:
                fields[part] = info.model_copy(update={"source": told(info.source)})
        return self.finish(**fields)

    def finish(self, **fields: Any) -> Bundle:
        """Writes the manifest, checks the whole bundle as the runtime would, and puts it in place.

        `fields` are Manifest's, except schema_version, created, tool_version, tokenizer and artifacts. An old
        bundle at `path` (with force) goes only when the new one is there, and comes back if that fails.
        """
        own: Mapping[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "name": self.path.name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "tool_version": version("eagle-export"),
            "tokenizer": tuple(self._tokenizer),
            "artifacts": tuple(self._artifacts),
        }
        try:
            manifest = Manifest(**{**own, **fields})
        except ValidationError as error:
            raise explain(error, Manifest, f"manifest of {self.path}") from None
        self.file(MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        load_bundle(self.folder)
        self.journal.publish(self.path, [entry.path for entry in manifest.files()])
        remember_sha256({self.path / entry.path: entry.sha256 for entry in manifest.files()})
        return Bundle(self.path, manifest)
