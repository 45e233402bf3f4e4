"""A target with something to learn, its answers, and a head trained on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.trainset import answers_by, request_of, write_learned_target, write_npz

from eagle_export.progress import Progress
from eagle_export.train.run import train


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_learned_target(tmp_path_factory.mktemp("learned") / "target")


@pytest.fixture(scope="session")
def data(learned: Path) -> Path:
    rows = answers_by(learned, count=96, prompt=8, new=56)
    return write_npz(learned.parent / "data.npz", rows, [8] * len(rows))


@pytest.fixture(scope="session")
def trained(learned: Path, data: Path) -> Path:
    out = learned.parent / "head"
    train(request_of(learned, data, out), Progress(quiet=True))
    return out
