"""What training refuses, each with its own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import write_head
from support.trainset import TALKS, VOCAB, WIDTH, batch_of, head_of, request_of, spec_of, write_npz
from support.updater import Given

from eagle_export.heads.load import LoadedHead
from eagle_export.progress import Progress
from eagle_export.train import checkpoint
from eagle_export.train.objective import Objective
from eagle_export.train.prepare import _continued
from eagle_export.train.run import train
from eagle_export.train.samples import load_samples
from eagle_export.train.settings import TrainSettings
from eagle_export.train.trainer import Trainer
from eagle_run.errors import EagleError, UsageError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "eagle9"}, "algorithm is 'eagle9', expected one of eagle3, eagle1"),
        ({"loss": "l2"}, "loss is 'l2', expected one of distribution, regression, hass"),
        ({"features": "all"}, "features is 'all', expected one of fused, top"),
        ({"precision": "fp8"}, "precision is 'fp8', expected one of auto, fp32, bf16"),
        ({"steps": 0}, "steps is 0, expected a positive number"),
        ({"accumulate": -1}, "accumulate is -1, expected a positive number"),
        ({"lr": 0.0}, "lr is 0.0, expected a positive number"),
        ({"lr": float("nan")}, "lr is nan, expected a positive number"),
        ({"average": 1.0}, "average is 1.0, expected 0"),
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainSettings(**changes)


def no_shards(folder: Path) -> None:
    (folder / "data.json").write_text("{}")


def broken_shard(folder: Path) -> None:
    no_shards(folder)
    (folder / "00000.safetensors").write_bytes(b"no such file")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda folder: None, "no data.json"),
        (lambda folder: (folder / "data.json").write_text("{"), "data.json: not readable as JSON"),
        (no_shards, "no shards"),
        (broken_shard, "00000.safetensors: not a whole safetensors file"),
    ],
    ids=["nothing", "no JSON", "no shards", "broken shard"],
)
def test_folders_that_are_no_data(made: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(EagleError, match=message) as refused:
        load_samples([tmp_path], vocab_size=20)
    assert "eagle-export data" in str(refused.value.hint)


def test_arrays_that_an_npz_lacks_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", tokens=np.arange(4))
    with pytest.raises(EagleError, match=r"d\.npz: no offsets, prompt_lengths"):
        load_samples([tmp_path / "d.npz"], vocab_size=20)


def test_a_target_that_caps_its_logits_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    """The labels would be those of another distribution."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    data = write_npz(tmp_path / "d.npz", TALKS, [1, 1, 1])
    with pytest.raises(UsageError, match="final_logit_softcapping"):
        train(request_of(target, data, tmp_path / "head"), Progress(quiet=True))
    assert not (tmp_path / "head").exists()


def test_a_head_that_reads_the_last_layer_is_not_trained_further(tiny_target: Path, tmp_path: Path) -> None:
    """Of three layers it names the first and the last: ids 1 and, in front of the final norm, 4."""
    head = write_head(tmp_path / "given", tiny_target, layer_ids=(0, 2))
    data = write_npz(tmp_path / "d.npz", TALKS, [1, 1, 1])
    request = replace(request_of(tiny_target, data, tmp_path / "head"), init=str(head))
    with pytest.raises(UsageError, match=r"last layer \(ids \[1, 4\]\), expected ids below 3") as refused:
        train(request, Progress(quiet=True))
    assert refused.value.parameters == ("init",)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        ({"layers": (0, 1)}, {}, "has its layers and heads"),
        ({"kv_heads": 2}, {}, "has its layers and heads"),
        ({}, {"layers": 2}, "only heads of one layer"),
        ({}, {"target_hidden_size": 8}, "only heads of one layer"),
        ({}, {"own_embedding": True}, "only heads of one layer"),
    ],
)
def test_heads_that_are_not_trained_further(
    settings: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    head = LoadedHead(Path("head"), spec_of(**spec), {}, torch.arange(20))
    with pytest.raises(UsageError, match=message):
        _continued(TrainSettings(**settings), head)


def test_more_workers_than_batches() -> None:
    spec = spec_of()
    fuse, draft = head_of(spec)
    settings = TrainSettings(steps=2)
    workers: Any = SimpleNamespace(count=3, rank=0, device=torch.device("cpu"), wrap=lambda module: module)
    with pytest.raises(UsageError, match="fewer batches than the 3 workers") as refused:
        Trainer(
            Objective(fuse, draft, torch.zeros(20, WIDTH), torch.zeros(VOCAB).long(), settings),
            source=Given(batch_of(spec, [9, 9], [2, 2])),
            lengths=torch.tensor([9, 9]),
            numbers=torch.arange(2),
            settings=settings,
            workers=workers,
        )
    assert refused.value.parameters == ("batch_tokens",)


def test_checkpoints_that_cannot_be_resumed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, {"weights": [torch.zeros(1000)]}, keep=2)
    assert list(checkpoint.load(path)) == ["weights"]
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(EagleError, match=r"update-0000003\.pt: not a whole checkpoint") as refused:
        checkpoint.load(path)
    assert "the one before" in str(refused.value.hint)
    for other in ({"version": 0}, [1]):
        torch.save(other, path)
        with pytest.raises(EagleError, match="not a checkpoint of this version"):
            checkpoint.load(path)
