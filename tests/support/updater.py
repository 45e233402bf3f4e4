"""One update of a small head: its loss and the gradients that the optimiser saw. Also run by two workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle_export.train.objective import Objective
from eagle_export.train.settings import TrainSettings
from eagle_export.train.trainer import Trainer
from eagle_export.train.ttt import Batch
from eagle_export.train.workers import Workers
from support.trainset import VOCAB, WIDTH, batch_of, head_of, spec_of

LENGTHS, PROMPTS = [30, 30, 12, 12], [2, 4, 9, 8]  # 54 rows and 7


class Given:
    """Batches of conversations that are all in memory."""

    def __init__(self, whole: Batch) -> None:
        self.whole = whole

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        whole, chosen = self.whole, list(numbers)
        parts = (whole.tokens, whole.answers, whole.features, whole.last, whole.best)
        return Batch(*(part[chosen].to(device) for part in parts))


def update(
    batch_tokens: int, accumulate: int, prompts: list[int] = PROMPTS, precision: str = "fp32"
) -> dict[str, Tensor]:
    """loss [1], rows [1] and one gradient a weight, of the first update over all conversations.

    The precision is always said: left to itself the trainer takes bf16 on processors with AMX.
    """
    spec = spec_of()
    fuse, draft = head_of(spec, scale=4)
    lm_head = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(3))
    own = torch.arange(VOCAB).clamp(max=19)
    sizes = {"batch_tokens": batch_tokens, "accumulate": accumulate}
    settings = TrainSettings(steps=3, clip=1e9, max_updates=1, precision=precision, **sizes)
    trainer = Trainer(
        Objective(fuse, draft, lm_head, own, settings),
        source=Given(batch_of(spec, LENGTHS, prompts)),
        lengths=torch.tensor(LENGTHS),
        numbers=torch.arange(4),
        settings=settings,
        workers=Workers("cpu"),
    )
    done = trainer.update()
    states = trainer.optimizer.state_dict()["state"]
    grads = {str(key): state["exp_avg"] / 0.1 for key, state in states.items()}
    trainer.workers.wait()
    return {"loss": torch.tensor([done.loss]), "rows": torch.tensor([float(done.rows)]), **grads}


if __name__ == "__main__":
    found = [update(60, 1), update(12, 2)]  # a batch or two for each worker
    workers = Workers("cpu")
    assert workers.count == 2
    if workers.first:
        torch.save(found, Path(sys.argv[1]))
    workers.close()
