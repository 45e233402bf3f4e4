"""Pickles that would run code: refused in our words, which never advise to load them all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.headmaker import RECIPES, make_head
from support.tiny import write_target

from eagle_export.checkpoints.pickled import load_pickled
from eagle_export.heads.load import load_head
from eagle_export.models.target import load_target
from eagle_export.train import checkpoint
from eagle_run.errors import EagleError

ADVICE = ("weights_only", "PyTorch", "torch.load", "Re-running", "will likely succeed", "http")


class Touch:
    """Makes a file when it is unpickled without care."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.place),)


def refused(load: Callable[[], object], *words: str) -> None:
    with pytest.raises(EagleError) as caught:
        load()
    said = str(caught.value)
    assert not [advice for advice in ADVICE if advice in said], said
    assert all(word in said for word in words), said
    assert caught.value.hint


def test_a_pickle_that_would_run_code(tmp_path: Path) -> None:
    file, ran = tmp_path / "a.bin", tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": Touch(ran)}, file)
    name = f"{os.mkdir.__module__}.mkdir"
    refused(
        lambda: load_pickled(file, " is no table", hint="x"), f"a.bin is no table: it holds {name}, which"
    )
    assert not ran.exists()
    torch.load(file, weights_only=False)
    assert ran.is_dir()  # so it would have


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04" + bytes(40), b"\x80\x02}q\x00."])
def test_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(content)
    refused(lambda: load_pickled(file, " is no table", hint="x"), "a.bin is no table: it is damaged")
    refused(lambda: load_pickled(tmp_path / "none", "", hint="x"), "No such file")


def test_a_target(tmp_path: Path) -> None:
    folder, ran = write_target(tmp_path / "target"), tmp_path / "ran"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "extra": Touch(ran)}, folder / "pytorch_model.bin")
    refused(lambda: load_target(folder, torch.float32), str(folder), "could run code")
    assert not ran.exists()


def test_a_head(tmp_path: Path) -> None:
    head = make_head(RECIPES["eagle3-safeai"])
    folder, ran = head.write(tmp_path / "head"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({**head.tensors, "extra": Touch(ran)}, folder / "pytorch_model.bin")
    refused(lambda: load_head(folder, head.target), "pytorch_model.bin", "could run code")
    assert not ran.exists()


def test_a_checkpoint_of_training(tmp_path: Path) -> None:
    path, ran = tmp_path / "update-0000001.pt", tmp_path / "ran"
    torch.save({"version": 1, "extra": Touch(ran)}, path)
    refused(lambda: checkpoint.load(path), "not a whole checkpoint", "could run code")
    assert not ran.exists()
