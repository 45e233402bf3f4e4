"""Tests that need a GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks` is a folder of the checkout and not installed: models of random weights are from there."""
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA GPU; torch {torch.__version__} finds none")
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def device(_gpu: None) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def setup(device: torch.device) -> Iterator[Any]:
    """A tiny random model in float32, where ties are rare, behind eager graphs."""
    from benchmarks.gpu_models import random_model

    yield random_model("tiny", device, max_seq_len=128, chunk=16, rows=48, dtype=torch.float32).setup
    torch.cuda.empty_cache()
