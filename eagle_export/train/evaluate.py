"""How good a head is on conversations that it was not trained on.

acceptance[i]      of the rows of unrolled step i, the share whose best draft token is the target's best.
acceptance_top[i]  the share whose target's best is among the draft's `TOP` best.
tokens_per_round   what decoding with a chain of K drafts gives on these very texts: from the first answer
                   token on, each round emits the drafts that agree with the text, and one more. It is
                   exact, whatever the temperature of the text: a draft is accepted when it is what the
                   target draws.
tokens_per_round_top  the same, where every level has the `TOP` best of the draft below the accepted path:
                   what a tree of such levels could reach at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_export.train.features import BatchSource
from eagle_export.train.loss import CHUNK
from eagle_export.train.objective import Objective
from eagle_export.train.ttt import Batch, unroll

TOP = 4


@dataclass(frozen=True)
class Validation:
    """See the module's text. rows: of step 0."""

    acceptance: tuple[float, ...]
    acceptance_top: tuple[float, ...]
    tokens_per_round: float
    tokens_per_round_top: float
    rows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    objective: Objective,
    source: BatchSource,
    batches: Iterable[Sequence[int]],
    device: torch.device,
    *,
    steps: int,
    autocast: torch.dtype | None = None,
) -> Validation:
    """Runs the head over the conversations of `batches`, `steps` steps deep."""
    best, best_top = torch.zeros(steps), torch.zeros(steps)
    rows = torch.zeros(steps)
    chain, wide = [0, 0], [0, 0]  # tokens, rounds
    with torch.no_grad():
        for numbers in batches:
            batch = source.batch(numbers, device)
            narrow = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
            with narrow:
                ranks, true_ranks, valid = _ranks(objective, batch, steps)
            best += ((ranks == 0) & valid).sum(1).cpu()
            best_top += ((ranks < TOP) & valid).sum(1).cpu()
            rows += valid.sum(1).cpu()
            rounds_of = _starts(batch)
            for total, most in ((chain, 1), (wide, TOP)):
                accepted = ((true_ranks < most) & valid).long().cumprod(0).sum(0)
                emitted, rounds = _decode(rounds_of, accepted.tolist(), batch.tokens.shape[1])
                total[0] += emitted
                total[1] += rounds
    share = rows.clamp(min=1)
    return Validation(
        acceptance=tuple((best / share).tolist()),
        acceptance_top=tuple((best_top / share).tolist()),
        tokens_per_round=chain[0] / max(1, chain[1]),
        tokens_per_round_top=wide[0] / max(1, wide[1]),
        rows=int(rows[0]),
    )


def _ranks(objective: Objective, batch: Batch, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many draft tokens score above the target's best token and above the text's own; and `valid`.

    int64, int64 and bool, all [K, N]. A token that the draft vocabulary lacks has rank Vd.
    """
    draft, own = objective.draft, objective.own
    unrolled = unroll(objective.fuse, draft, batch, steps)
    best = own[batch.best.flatten()[unrolled.labels]]  # [K, N]
    true = own[batch.tokens.flatten()[unrolled.labels + 1]]
    eagle3 = draft.spec.algorithm == "eagle3"
    raw = torch.cat(unrolled.raw)
    ranks = [torch.empty_like(best).flatten() for _ in range(2)]
    for first in range(0, len(raw), CHUNK):
        part = slice(first, first + CHUNK)
        rows = draft.norm(raw[part]) if eagle3 else raw[part]
        table = draft.lm_head.weight if eagle3 else objective.head
        logits = (rows @ table.T.to(rows.dtype)).float()  # [r, Vd]
        for rank, tokens in zip(ranks, (best, true), strict=True):
            chosen = tokens.flatten()[part, None]
            score = logits.gather(1, chosen.clamp(min=0))
            above = (logits > score).sum(1)
            rank[part] = torch.where(chosen[:, 0] >= 0, above, logits.shape[1])
    return ranks[0].view_as(best), ranks[1].view_as(best), unrolled.valid


def _starts(batch: Batch) -> list[int]:
    from eagle_export.train.ttt import starts

    return starts(batch).tolist()


def _decode(rows: Sequence[int], accepted: Sequence[int], length: int) -> tuple[int, int]:
    """Plays the rounds of each conversation: rows ascending, accepted drafts of each -> tokens, rounds."""
    at = emitted = rounds = 0
    while at < len(rows):
        step = 1 + accepted[at]
        here = rows[at]
        end = min(here + step, (here // length + 1) * length)
        after = bisect_left(rows, end, lo=at + 1)
        emitted += min(step, after - at)  # the last round of an answer ends with it
        rounds += 1
        at = after
    return emitted, rounds
