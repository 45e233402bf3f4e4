"""What the tests of `eagle-export data` share; fixtures are in conftest.py."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle_export.data.generator import Generator, Place, open_generator

Outcome = namedtuple("Outcome", "code out err")
Cli = Callable[..., Outcome]
MAX_SEQ_LEN = 96


def load_shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def generator_of(target: Path, batch: int = 4) -> Generator:
    return open_generator(str(target), Place("cpu", "fp32", batch), MAX_SEQ_LEN, lambda _: None)
