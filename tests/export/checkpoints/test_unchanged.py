"""Files that change while they are exported are noticed, and what else happens to them is not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle_export.checkpoints.unchanged import Unchanged
from eagle_run.errors import EagleError

SHARDS = ("a.safetensors", "b.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in SHARDS:
        save_file({name: torch.ones(4)}, folder / name)
    index = {"weight_map": {name: name for name in SHARDS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def same_size_and_time(model: Path) -> None:
    file = model / "b.safetensors"
    other = shutil.copy2(file, model / "other")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    other.replace(file)


def written_in_place(model: Path) -> None:
    with (model / "a.safetensors").open("r+b") as file:
        file.write(b"x")


def gone(model: Path) -> None:
    (model / "b.safetensors").unlink()


def another_config(model: Path) -> None:
    (model / "config.json").write_text('{"rope_theta": 1}')


def other_files_count(model: Path) -> None:
    save_file({"w": torch.ones(4)}, model / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (same_size_and_time, "b.safetensors is another file"),
        (written_in_place, "a.safetensors is another file"),
        (gone, "b.safetensors, not found"),
        (another_config, "config.json is another file"),
        (other_files_count, "a.safetensors is another file"),
    ],
)
def test_changed_weights_are_noticed(model: Path, change: Callable[[Path], None], words: str) -> None:
    check = Unchanged(model)
    check()
    change(model)
    with pytest.raises(EagleError, match="changed while they were exported") as caught:
        check()
    assert words in caught.value.message
    assert caught.value.hint


def test_one_file_may_be_a_model(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    check = Unchanged(file)
    check()
    file.write_bytes(b"22")
    with pytest.raises(EagleError, match=r"m\.gguf is another file"):
        check()


def test_what_does_not_change_weights_is_no_change(model: Path, tmp_path: Path) -> None:
    check = Unchanged(model)
    os.link(model / "a.safetensors", tmp_path / "linked")
    (model / "a.safetensors").chmod(0o400)
    (model / "README.md").write_text("read")
    (model / "b.safetensors").read_bytes()
    check()


def test_linking_may_give_a_file_another_number(model: Path) -> None:
    """A layered file system copies a file of a lower layer when it is linked."""
    check = Unchanged(model, linked=True)
    file = model / "a.safetensors"
    shutil.copy2(file, model / "copy").replace(file)
    check()
    file.touch()
    with pytest.raises(EagleError, match="changed"):
        check()
