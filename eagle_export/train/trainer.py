"""The training loop: batches → unrolled loss → clip → AdamW, with checkpoints that resume bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle_export.train.batches import epoch_batches, share
from eagle_export.train.features import BatchSource
from eagle_export.train.objective import Objective
from eagle_export.train.settings import TrainSettings
from eagle_export.train.workers import Workers, autocast_type
from eagle_run.errors import UsageError


@dataclass
class RunState:
    """Where a run stands. epoch and index: the next batch of this worker."""

    update: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    best: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Update:
    """What one did: loss, share of hits by step, answer rows, places, seconds."""

    update: int
    loss: float
    acceptance: tuple[float, ...]
    rows: int
    tokens: int
    seconds: float
    lr: float


def learning_rate(update: int, total: int, settings: TrainSettings) -> float:
    """Of update number `update` (0 is the first): linear warm-up, then a cosine to 0."""
    warm = max(1, round(settings.warmup * total))
    if update < warm:
        return settings.lr * (update + 1) / warm
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (update - warm) / max(1, total - warm)))


class Trainer:
    """Trains the parameters of `objective` that want gradients.

    lengths int64 [n] and numbers int64: lengths of all conversations, and which of them to train on.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        source: BatchSource,
        lengths: Tensor,
        numbers: Tensor,
        settings: TrainSettings,
        workers: Workers,
    ) -> None:
        self.objective, self.source, self.settings, self.workers = objective, source, settings, workers
        self.lengths, self.numbers = lengths, numbers
        self.run_state = RunState()
        self.autocast = autocast_type(settings.precision, workers.device)
        self._wrapped = workers.wrap(objective)
        self._weights = [p for p in objective.parameters() if p.requires_grad]
        decayed = [p for p in self._weights if p.dim() > 1]
        rest = [p for p in self._weights if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._average = [p.detach().clone() for p in self._weights] if settings.average else None
        self._batches: tuple[int, list[list[int]]] | None = None
        if not self._epoch(0):
            raise UsageError(
                f"fewer batches than the {workers.count} workers",
                hint="make the batches smaller",
                parameters=["batch_tokens"],
            )
        self.total = settings.max_updates or max(
            1, settings.epochs * len(self._epoch(0)) // settings.accumulate
        )

    @property
    def done(self) -> bool:
        return self.run_state.update >= self.total

    def update(self) -> Update:
        """One update of the weights.

        Its loss is the mean over all rows of its batches, those of other workers included, however they are
        spread over batches. How many there are is known at the end, so gradients are scaled then.
        """
        began, state, settings = time.perf_counter(), self.run_state, self.settings
        lr = learning_rate(state.update, self.total, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        device = self.workers.device
        sums = torch.zeros(1 + 2 * settings.steps + 1, device=device)
        for part in range(settings.accumulate):
            batch = self.source.batch(self._next(), device)
            sums[-1] += batch.tokens.numel()
            last = part == settings.accumulate - 1
            with self.workers.no_sync(self._wrapped, last=last):
                with self._narrow():
                    outcome = self._wrapped(batch, self._noise(state.update * settings.accumulate + part))
                loss = outcome.loss * outcome.rows[0]
                loss.backward()
            sums[0] += loss.detach()
            sums[1:-1] += torch.cat((outcome.hits, outcome.rows)).float()
        sums = self.workers.total(sums)
        hits, rows = sums[1:-1].view(2, -1)
        count = rows[0].clamp(min=1)
        grads = [p.grad for p in self._weights if p.grad is not None]
        torch._foreach_mul_(grads, self.workers.count / count)  # their mean over workers was taken
        torch.nn.utils.clip_grad_norm_(self._weights, settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._follow()
        mean, tokens = float(sums[0] / count), int(sums[-1])
        state.update += 1
        state.tokens += tokens
        acceptance = tuple((hits / rows.clamp(min=1)).tolist())
        seconds = time.perf_counter() - began
        return Update(state.update, mean, acceptance, int(rows[0]), tokens, seconds, lr)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While this lasts the weights are their running average, if one is kept."""
        if self._average is None:
            yield
            return
        own = [p.detach().clone() for p in self._weights]
        self._put(self._average)
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        at = self.run_state
        return {
            "weights": [p.detach().clone() for p in self._weights],
            "average": self._average,
            "optimizer": self.optimizer.state_dict(),
            "progress": {**at.__dict__, "history": list(at.history)},
            "total": self.total,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave, in a trainer of the same settings and data."""
        self._put(state["weights"])
        if self._average is not None:
            self._average = [x.to(self.workers.device) for x in state["average"]]
        self.optimizer.load_state_dict(state["optimizer"])
        self.run_state = RunState(**state["progress"])
        self.total = state["total"]
        self._batches = None

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._weights, values, strict=True):
                parameter.copy_(value)

    def _follow(self) -> None:
        if self._average is None:
            return
        update = self.run_state.update
        keep = min(self.settings.average, (1 + update) / (10 + update))  # young averages follow faster
        torch._foreach_lerp_(self._average, [p.detach() for p in self._weights], 1 - keep)

    def _narrow(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.workers.device.type, self.autocast)

    def _noise(self, number: int) -> Callable[[Tensor], Tensor] | None:
        """EAGLE-1's uniform noise on features, a pure function of seed and batch."""
        amount = self.settings.noise
        if not amount:
            return None

        def add(features: Tensor) -> Tensor:
            mixed = (self.settings.seed * 7919 + number) * self.workers.count + self.workers.rank
            generator = torch.Generator().manual_seed(mixed)
            noise = torch.rand(features.shape, generator=generator).to(features)
            return features + (noise - 0.5) * 2 * amount

        return add

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._batches is None or self._batches[0] != epoch:
            settings = self.settings
            every = epoch_batches(
                self.lengths.clamp(max=settings.max_length),
                self.numbers,
                settings.batch_tokens,
                seed=settings.seed,
                epoch=epoch,
            )
            self._batches = epoch, share(every, self.workers.rank, self.workers.count)
        return self._batches[1]

    def _next(self) -> list[int]:
        state = self.run_state
        if state.index >= len(self._epoch(state.epoch)):
            state.epoch, state.index = state.epoch + 1, 0
        state.index += 1
        return self._epoch(state.epoch)[state.index - 1]
