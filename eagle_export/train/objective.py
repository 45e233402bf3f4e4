"""One batch to one number: the unrolled steps, what they should have said, and how much each counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_export.models.head import Draft, Fuse
from eagle_export.train.loss import feature_loss, soft_cross_entropy, target_goal
from eagle_export.train.settings import TrainSettings
from eagle_export.train.ttt import Batch, unroll


@dataclass(frozen=True, eq=False)
class Outcome:
    """loss: scalar to minimise. Per step [K], without gradient: cross-entropy summed, hits and rows counted.

    A hit is a row whose best draft token is the target's; one that the draft vocabulary lacks is a miss.
    """

    loss: Tensor
    cross_entropy: Tensor
    hits: Tensor
    rows: Tensor


class Objective(nn.Module):
    """Fuse and draft with their loss, as one module, so that data parallelism can wrap it.

    head [Vd, H]: the target's lm_head in the draft vocabulary, which makes the labels. own int64 [V].
    """

    head: Tensor
    own: Tensor

    def __init__(
        self, fuse: Fuse | None, draft: Draft, head: Tensor, own: Tensor, settings: TrainSettings
    ) -> None:
        super().__init__()
        self.fuse, self.draft, self.settings = fuse, draft, settings
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("own", own, persistent=False)

    def forward(self, batch: Batch, noise: Callable[[Tensor], Tensor] | None = None) -> Outcome:
        """Loss per started row: Σ_i decay^i · Σ_n L(i, n) / N, over rows whose goal the draft can say."""
        chosen, draft = self.settings, self.draft
        unrolled = unroll(self.fuse, draft, batch, chosen.steps, noise=noise)
        steps, count = unrolled.labels.shape
        label_rows, index = unrolled.labels.unique(return_inverse=True)  # [M], [K, N]: labels repeat
        last = batch.last.flatten(0, 1)[label_rows]
        top = chosen.top_tokens if chosen.loss == "hass" else 0
        goal = target_goal(last, batch.best.flatten()[label_rows], self.head, self.own, top=top)
        best = goal.best[index]  # [K, N]
        decay = chosen.decay ** torch.arange(steps, device=best.device, dtype=torch.float32)
        counted = unrolled.valid & (best >= 0)
        weight = counted * decay[:, None] / max(1, count)  # [K, N]
        raw = torch.cat(unrolled.raw)  # [K * N, Hd]
        eagle3 = draft.spec.algorithm == "eagle3"
        rows = draft.norm(raw) if eagle3 else raw
        table = draft.lm_head.weight if eagle3 else self.head
        scored = soft_cross_entropy(rows, table, goal.probabilities, index.flatten(), weight.flatten())
        loss = scored.loss
        if chosen.regresses:
            reached = unrolled.valid * decay[:, None] / max(1, count)
            told = last[index.flatten()]
            loss = feature_loss(raw, told, reached.flatten()) + chosen.ce_weight * loss
        hit = (scored.guess.view(steps, count) == best) & unrolled.valid
        entropy = scored.cross_entropy.view(steps, count) * counted
        return Outcome(loss, entropy.sum(1), hit.sum(1), unrolled.valid.sum(1))
