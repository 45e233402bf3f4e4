"""An update is the same, however its conversations are spread over batches and workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.updater import LENGTHS, update
from torch import Tensor

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """All conversations in one batch."""
    found = update(batch_tokens=120, accumulate=1)
    assert found["rows"] == 54 + 7
    assert max(grad.abs().max() for name, grad in found.items() if name.isdigit()) > 0.01
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_unequal_halves_make_the_update_of_the_whole(whole: dict[str, Tensor]) -> None:
    """54 answer rows in one batch, 7 in the other."""
    assert_same(update(batch_tokens=60, accumulate=2), whole)


def test_single_conversations_make_the_update_of_the_whole(whole: dict[str, Tensor]) -> None:
    assert_same(update(batch_tokens=30, accumulate=3), whole)  # the short ones share a batch


def test_an_update_without_answers_changes_nothing() -> None:
    """As of conversations that --max-length cuts inside their prompts: no division by their number."""
    found = update(batch_tokens=60, accumulate=2, prompts=LENGTHS)
    assert len(found) > 2
    assert {name: float(value.abs().max()) for name, value in found.items()} == dict.fromkeys(found, 0.0)


def test_bf16_halves_make_the_update_of_the_whole_within_its_rounding() -> None:
    """bfloat16 keeps 8 bits: a gradient that is summed in other groups moves by a few parts in a hundred."""
    whole = update(batch_tokens=120, accumulate=1, precision="bf16")
    halves = update(batch_tokens=60, accumulate=2, precision="bf16")
    exact = update(batch_tokens=120, accumulate=1, precision="fp32")
    assert halves["rows"] == whole["rows"] == exact["rows"]
    for name in whole.keys() - {"rows"}:
        size = exact[name].abs().max()
        assert (halves[name] - whole[name]).abs().max() <= 0.02 * size, name
        assert (whole[name] - exact[name]).abs().max() <= 0.05 * size, name
    assert not torch.equal(whole["loss"], exact["loss"])  # so it was bfloat16


def test_two_workers_make_the_update_of_the_whole(whole: dict[str, Tensor], tmp_path: Path) -> None:
    """As torchrun starts them, with one batch and with two for each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, str(TESTS / "support" / "updater.py"), str(tmp_path / "found.pt")]
    workers = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    try:
        assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    for found in torch.load(tmp_path / "found.pt"):
        assert_same(found, whole)
