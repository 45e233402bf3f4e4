"""`eagle-export train` from beginning to end: prepare, train, evaluate, keep the best head."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eagle_export.files import alone_in
from eagle_export.heads.write import write_head
from eagle_export.train import checkpoint, record
from eagle_export.train.batches import pack, split
from eagle_export.train.evaluate import Validation, evaluate
from eagle_export.train.interrupt import deferred
from eagle_export.train.prepare import Prepared, TrainRequest, head_tensors, prepare
from eagle_export.train.trainer import Trainer, Update
from eagle_export.train.workers import Workers
from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    from eagle_export.progress import Progress

_HISTORY_EVERY = 10  # updates per point of the loss curve
_KEPT = ("training.json", "config.json", "model.safetensors")  # that are not written over
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Result:
    """What came of it; as training.json in the head's folder."""

    facts: dict[str, Any]
    first: bool = True  # False in all workers but the one that talks to the user

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.facts.items() if key != "history"}


def train(request: TrainRequest, progress: Progress) -> Result:
    """Trains a head into `request.out`: config.json and model.safetensors of the best one by validation,
    training.json, curve.png, and checkpoints/.

    Ctrl-C saves a checkpoint, and ends in EagleError that says so. Raises UsageError where `out` holds
    another run or another model, or `resume` finds none; EagleError where another run is writing there.
    """
    _check_out(request)
    workers = Workers(request.device)
    if not workers.first:
        from eagle_export.progress import Progress as Quiet

        progress = Quiet(quiet=True)
    try:
        with alone_in(request.out) if workers.first else nullcontext():
            prepared = prepare(request, workers, progress)
            return _Run(request, prepared, workers, progress).go()
    finally:
        workers.close()


def _check_out(request: TrainRequest) -> None:
    checkpoints = checkpoint.found(request.out / "checkpoints")
    other = [name for name in _KEPT if (request.out / name).exists()]
    if request.resume and not checkpoints:
        raise UsageError(
            f"{request.out}: no checkpoint to resume",
            hint="start anew in another folder" if other else "start anew",
            parameters=["out"] if other else ["resume"],
        )
    if checkpoints and not request.resume:
        raise UsageError(
            f"{request.out} already holds a training run; it is kept",
            hint="resume it, or choose another folder",
            parameters=["resume", "out"],
        )
    if other and not request.resume:
        raise UsageError(
            f"{request.out} already holds {', '.join(other)}; it is left alone",
            hint="choose another folder",
            parameters=["out"],
        )


class _Run:
    """One run: the loop around a trainer."""

    def __init__(
        self, request: TrainRequest, prepared: Prepared, workers: Workers, progress: Progress
    ) -> None:
        self.request, self.prepared, self.workers, self.progress = request, prepared, workers, progress
        self.settings = prepared.settings
        lengths = prepared.samples.lengths()
        numbers, held = split(len(lengths), self.settings.validation, self.settings.seed)
        if not len(held):
            progress.note(
                "nothing is held out (that takes 10 conversations): the last head counts as the best"
            )
        self.checks = pack(lengths, held[lengths[held].argsort(stable=True)], self.settings.batch_tokens)
        self.trainer = Trainer(
            prepared.objective,
            source=prepared.source,
            lengths=lengths,
            numbers=numbers,
            settings=self.settings,
            workers=workers,
        )
        self.checkpoints = request.out / "checkpoints"
        self._seconds = 0.0
        self._recent: list[Update] = []

    def go(self) -> Result:
        trainer = self.trainer
        if self.request.resume:
            self._restore()
        kept = self.prepared.vocabulary
        parameters = sum(p.numel() for p in trainer.objective.parameters() if p.requires_grad)
        self.progress.note(
            f"{len(trainer.numbers):,} conversations, {self.prepared.samples.token_count:,} tokens; draft "
            f"vocabulary {len(kept.ids):,} ({kept.coverage:.1%} of the answers); {parameters / 1e6:.1f} M "
            f"parameters to train; {trainer.total:,} updates on {self.workers.count} x {self.workers.device}"
        )
        with self.progress.bar("training") as show, deferred() as asked_to_stop:
            if not trainer.run_state.history:
                self._evaluate()
            while not trainer.done and not asked_to_stop():
                self._one(show)
            if not trainer.done:
                self._interrupted()
        if self.settings.save_every:
            self._save()
        return self._finish()

    def _one(self, show: Callable[[float, str], None]) -> None:
        trainer, settings = self.trainer, self.settings
        done = trainer.update()
        self._seconds += done.seconds
        self._recent.append(done)
        if not math.isfinite(done.loss):
            raise EagleError(
                f"the loss of update {done.update} is {done.loss}",
                hint="start anew with a lower learning rate, or in fp32; the best head so far is kept",
                parameters=["lr", "precision"],
            )
        show(done.update / trainer.total, record.progress_text(self._recent[-50:], trainer.total))
        if done.update % _HISTORY_EVERY == 0 or trainer.done:
            trainer.run_state.history.append(record.point(self._recent[-_HISTORY_EVERY:]))
        if done.update % settings.eval_every == 0 or trainer.done:
            self._evaluate()
        if settings.save_every and done.update % settings.save_every == 0:
            self._save()

    def _evaluate(self) -> None:
        """Looks at the held-out conversations, keeps the head if it is the best so far, draws the curve."""
        state = self.trainer.run_state
        if not self.workers.first:
            return
        with self.trainer.averaged():
            validation = self._validation()
            if validation is not None:
                state.history.append({"update": state.update, "validation": validation.as_dict()})
                self.progress.note(record.validation_text(state.update, validation, self._recent[-50:]))
            reached = 1.0 if validation is None else validation.tokens_per_round
            if validation is None or reached > state.best:
                state.best = reached
                self._write_head()
        self._write_facts()

    def _validation(self) -> Validation | None:
        if not self.checks:
            return None
        trainer = self.trainer
        trainer.objective.eval()
        try:
            validation = evaluate(
                trainer.objective,
                trainer.source,
                self.checks,
                self.workers.device,
                steps=max(self.settings.steps, 4),
                autocast=trainer.autocast,
            )
        finally:
            trainer.objective.train()
        return validation if validation.rows else None  # none of an answer within max_length

    def _write_head(self) -> None:
        config = self.prepared.config
        special = {key: getattr(config, key, None) for key in _SPECIAL}
        write_head(
            self.request.out,
            self.prepared.spec,
            head_tensors(self.prepared),
            self.prepared.vocabulary.ids,
            target_layers=config.num_hidden_layers,
            special={key: value for key, value in special.items() if isinstance(value, int)},
        )

    def _facts(self) -> dict[str, Any]:
        held = sum(map(len, self.checks))
        return record.facts(self.request, self.prepared, self.trainer, held_out=held)

    def _write_facts(self) -> None:
        facts = self._facts()
        self.request.out.mkdir(parents=True, exist_ok=True)
        record.write_json(self.request.out / "training.json", facts)
        record.draw(self.request.out / "curve.png", facts["history"])

    def _save(self) -> None:
        if not self.workers.first:
            return
        state = {
            **self.trainer.state(),
            "settings": self.settings.as_dict(),
            "data_sha256": self.prepared.samples.sha256,
            "target_sha256": self.prepared.target.sha256,
            "head_sha256": self.prepared.head_sha256,
            "workers": self.workers.count,
            "rng": torch.get_rng_state(),
        }
        checkpoint.save(self.checkpoints, self.trainer.run_state.update, state, self.settings.keep)

    def _restore(self) -> None:
        path = checkpoint.found(self.checkpoints)[-1]
        state = checkpoint.load(path)
        wrong = self.settings.differences(state["settings"])
        for name, ours in (
            ("data", self.prepared.samples.sha256),
            ("target", self.prepared.target.sha256),
            ("head", self.prepared.head_sha256),
        ):
            theirs = state.get(f"{name}_sha256", ours)
            if theirs != ours:
                wrong.append(f"{name}: was {theirs[:12]}…, is {ours[:12]}…")
        if state["workers"] != self.workers.count:
            wrong.append(f"workers: was {state['workers']}, is {self.workers.count}")
        if wrong:
            raise UsageError(
                f"{path.name} is of a run with other settings: {'; '.join(wrong)}",
                hint="resume with the same ones, or start anew from its head in another folder",
                parameters=["init", "out"],
            )
        self.trainer.restore(state)
        torch.set_rng_state(state["rng"])
        self.progress.note(f"goes on after update {self.trainer.run_state.update}")

    def _interrupted(self) -> None:
        self._save()
        update = self.trainer.run_state.update
        raise EagleError(
            f"interrupted after update {update}; a checkpoint is saved",
            hint="resume the run to go on",
            parameters=["resume"],
            exit_code=130,
        )

    def _finish(self) -> Result:
        if self.workers.first:
            self._write_facts()
        self.workers.wait()
        return Result({**self._facts(), "seconds": round(self._seconds, 1)}, self.workers.first)
