"""Training: a batch learnt by heart, a run that is interrupted, a head that then decodes faster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoding import Request, answers_of
from support.tiny import eager_engine, modules_of
from support.trainset import SETTINGS, VOCAB, WIDTH, answers_by, batch_of, head_of, request_of, spec_of

from eagle_export.progress import Progress
from eagle_export.train import record
from eagle_export.train.batches import split
from eagle_export.train.checkpoint import found
from eagle_export.train.objective import Objective
from eagle_export.train.run import train
from eagle_export.train.samples import load_samples
from eagle_export.train.settings import TrainSettings
from eagle_export.train.trainer import Trainer, learning_rate
from eagle_run.decoding.tree import TreeShape
from eagle_run.errors import EagleError, UsageError
from eagle_run.metrics import Metrics


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle1"])
def test_one_batch_is_learnt_by_heart(algorithm: str) -> None:
    spec = spec_of(algorithm)
    fuse, draft = head_of(spec, scale=5)
    batch = batch_of(spec, lengths=[14, 19], prompts=[4, 7])
    lm_head = 2 * torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(3))
    best = (batch.last @ lm_head.T).argmax(-1)  # what the target says it says
    batch = replace(batch, best=best)
    own = torch.full((VOCAB,), -1)
    own[:20] = torch.arange(20)
    objective = Objective(fuse, draft, lm_head, own, TrainSettings(algorithm=algorithm, steps=3))
    weights = [p for p in objective.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-3)
    first = objective(batch)
    for _ in range(300):
        optimizer.zero_grad()
        outcome = objective(batch)
        outcome.loss.backward()
        optimizer.step()
    assert (first.hits < first.rows // 2).all()
    assert (outcome.hits >= 0.95 * outcome.rows).all(), (outcome.hits, outcome.rows)
    assert outcome.loss < first.loss / 2


def test_learning_rate_rises_and_falls() -> None:
    settings = TrainSettings(lr=1.0, warmup=0.1)
    rates = [learning_rate(update, 100, settings) for update in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[55] == pytest.approx(0.5, abs=0.01)
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:], reverse=True)]
    assert 0 < rates[-1] < 0.001


def test_a_trained_head_speeds_decoding_up(learned: Path, trained: Path) -> None:
    modules = modules_of(learned, trained)
    prompts = [tuple(row) for row in answers_by(learned, count=12, prompt=12, new=1)]
    requests = [Request(prompt[:-1], max_new_tokens=48) for prompt in prompts[6:]]
    metrics = Metrics()
    engine = eager_engine(modules, batch=2)
    drafted = answers_of(engine, requests, TreeShape.chain(4), metrics=metrics)
    plain = answers_of(engine, requests, TreeShape.plain())
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    assert metrics.tokens_per_round > 1.5


def test_validation_foretells_what_decoding_gives(learned: Path, trained: Path, data: Path) -> None:
    """The held-out conversations decoded again, with chains as deep as the steps."""
    facts = json.loads((trained / "training.json").read_text())
    samples = load_samples([data], vocab_size=80)
    _, held = split(len(samples), SETTINGS.validation, SETTINGS.seed)
    rows = [samples.conversation(number)[0].tolist() for number in held.tolist()]
    requests = [Request(tuple(row[:8]), max_new_tokens=len(row) - 8) for row in rows]
    metrics = Metrics()
    engine = eager_engine(modules_of(learned, trained), batch=2)
    answers = answers_of(engine, requests, TreeShape.chain(SETTINGS.steps), metrics=metrics)
    assert [list(answer.tokens) for answer in answers] == [row[8:] for row in rows]
    foretold = facts["best"]["validation"]["tokens_per_round"]
    tokens = sum(len(answer.tokens) for answer in answers)  # what a last round emits beyond is not counted
    assert tokens / metrics.rounds == pytest.approx(foretold, rel=0.02)


def test_training_is_told(trained: Path) -> None:
    facts = json.loads((trained / "training.json").read_text())
    assert str(trained.parent) not in json.dumps(facts)  # a head is shipped with it
    first, best = facts["history"][0]["validation"], facts["best"]["validation"]
    assert best["tokens_per_round"] > 1.5 > first["tokens_per_round"]
    assert best["acceptance"][0] > 0.5
    assert all(a <= b for a, b in zip(best["acceptance"], best["acceptance_top"], strict=True))
    losses = [entry["loss"] for entry in facts["history"] if "loss" in entry]
    assert losses[-1] < losses[0] / 2
    assert (trained / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"average": 0.9, "accumulate": 2, "noise": 0.1}], ids=["plain", "all"])
def test_a_resumed_run_is_the_same_to_the_bit(
    learned: Path, data: Path, tmp_path: Path, extra: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, max_updates=24, save_every=5, eval_every=8, batch_tokens=1024, **extra)  # type: ignore[arg-type]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(request_of(learned, data, whole, settings), Progress(quiet=True))

    original, calls = Trainer.update, []

    def stop(self: Trainer) -> object:
        calls.append(1)
        if len(calls) == 13:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of an update, which is finished first
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", stop)
        with pytest.raises(EagleError, match="interrupted after update 13") as stopped:
            train(request_of(learned, data, parted, settings), Progress(quiet=True))
    assert stopped.value.exit_code == 130
    assert stopped.value.parameters == ("resume",)
    torch.manual_seed(999)  # another process starts with other random numbers
    train(replace(request_of(learned, data, parted, settings), resume=True), Progress(quiet=True))

    states = [torch.load(found(folder / "checkpoints")[-1], weights_only=True) for folder in (whole, parted)]
    for name in ("weights", "average"):
        if states[0][name] is None:
            assert states[1][name] is None
            continue
        for a, b in zip(states[0][name], states[1][name], strict=True):
            assert torch.equal(a, b)
    first, second = (state["optimizer"]["state"] for state in states)
    for key in first:
        assert torch.equal(first[key]["exp_avg_sq"], second[key]["exp_avg_sq"])
    heads = [load_file(folder / "model.safetensors") for folder in (whole, parted)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    histories = [json.loads((folder / "training.json").read_text())["history"] for folder in (whole, parted)]
    checks = [[entry for entry in history if "validation" in entry] for history in histories]
    assert checks[0] == checks[1]


def test_an_interruption_before_the_first_update_is_not_lost(
    learned: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries swallow KeyboardInterrupt while they are imported, as drawing the curve does."""
    original = record.draw

    def draw(*arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(0.01)
        return original(*arguments)

    request = request_of(learned, data, tmp_path / "run", replace(SETTINGS, max_updates=2))
    with monkeypatch.context() as patch:
        patch.setattr(record, "draw", draw)
        with pytest.raises(EagleError, match="interrupted after update 0"):
            train(request, Progress(quiet=True))
    facts = train(replace(request, resume=True), Progress(quiet=True)).as_dict()
    assert facts["updates"] == 2


def test_features_on_the_fly_are_those_of_the_cache(learned: Path, data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_updates=3)
    cached = request_of(learned, data, tmp_path / "cached", settings)
    train(cached, Progress(quiet=True))
    train(replace(cached, out=tmp_path / "fly", on_the_fly=True, features_cache=None), Progress(quiet=True))
    facts = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("cached", "fly")]
    assert facts[0]["last"]["validation"]["rows"] == facts[1]["last"]["validation"]["rows"] > 0
    losses = [[e["loss"] for e in fact["history"] if "loss" in e] for fact in facts]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert not (tmp_path / "fly" / "features").exists()


def test_resuming_with_other_settings_is_refused(learned: Path, data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_updates=2, save_every=1)
    request = request_of(learned, data, tmp_path / "run", settings)
    train(request, Progress(quiet=True))
    with pytest.raises(UsageError, match="already holds a training run"):
        train(request, Progress(quiet=True))
    with pytest.raises(UsageError, match=r"lr: was 0\.004, is 0\.1"):
        train(replace(request, resume=True, settings=replace(settings, lr=0.1)), Progress(quiet=True))
    with pytest.raises(UsageError, match="no checkpoint"):
        train(replace(request, resume=True, out=tmp_path / "none"), Progress(quiet=True))


def test_resuming_with_another_first_head_is_refused(
    learned: Path, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Its vocabulary may have another order, so the weights would mean other tokens."""
    settings = replace(SETTINGS, max_updates=2, save_every=1, draft_vocab=60)
    request = replace(request_of(learned, data, tmp_path / "run", settings), init=str(trained))
    train(request, Progress(quiet=True))
    train(replace(request, resume=True), Progress(quiet=True))
    head = tmp_path / "other"
    tensors = load_file(trained / "model.safetensors")
    tensors["d2t"] = (tensors["d2t"] + torch.arange(60)).flip(0) - torch.arange(60)
    head.mkdir()
    (head / "config.json").write_bytes((trained / "config.json").read_bytes())
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(UsageError, match="head: was"):
        train(replace(request, resume=True, init=str(head)), Progress(quiet=True))


def test_a_loss_that_is_no_number_ends_the_run(
    learned: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Trainer) -> object:
        return replace(original(self), loss=float("nan"))

    original = Trainer.update
    monkeypatch.setattr(Trainer, "update", broken)
    request = request_of(learned, data, tmp_path / "run", replace(SETTINGS, max_updates=2, save_every=1))
    with pytest.raises(EagleError, match="loss of update 1 is nan"):
        train(request, Progress(quiet=True))
    for resume in (False, True):  # there is no checkpoint, and no advice that sends one round in circles
        with pytest.raises(UsageError) as refused:
            train(replace(request, resume=resume), Progress(quiet=True))
        assert refused.value.parameters == ("out",)
        assert "another folder" in refused.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 1},
        {"features": "top"},
        {"algorithm": "eagle1", "loss": "regression", "noise": 0.1, "steps": 1},
        {"algorithm": "eagle1", "loss": "hass", "steps": 3},
        {"precision": "bf16", "freeze_lm_head": True},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()),
)
def test_every_ablation_trains_and_loads(
    learned: Path, data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    settings = replace(SETTINGS, max_updates=8, **changes)  # type: ignore[arg-type]
    out = tmp_path / "head"
    facts = train(request_of(learned, data, out, settings), Progress(quiet=True)).as_dict()
    assert facts["updates"] == 8
    modules = modules_of(learned, out)  # as eagle-export reads it
    assert modules.draft is not None
    if changes.get("features") == "top":
        assert modules.draft.spec.feature_layers == (3,)


def test_training_goes_on_from_a_head(learned: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_updates=1, lr=1e-9)
    request = request_of(learned, data, tmp_path / "more", settings)
    train(replace(request, init=str(trained)), Progress(quiet=True))
    before, after = (
        json.loads((folder / "training.json").read_text()) for folder in (trained, tmp_path / "more")
    )
    best, start = before["best"]["validation"], after["history"][0]["validation"]
    assert start["acceptance"] == pytest.approx(best["acceptance"], abs=0.01)  # fp16 lies between
