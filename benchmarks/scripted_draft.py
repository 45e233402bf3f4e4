"""A draft whose proposals are right at a chosen share of places: speed as a function of accepted tokens.

The real draft runs, so a round costs what it costs; then its logits are changed on the device, so that what
is known to be the target's own continuation is proposed first at some positions and never at the others.
Which ones is a coin of slot and position. The script is data in tensors of fixed place: another share or
another text needs no new capture of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eagle_run.backends.base import Graph, Run
from eagle_run.backends.stream import on_stream, wait
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.decoding.rng import uniform

LIKELY, NEVER = 60.0, -60.0  # logits that no other one reaches


class Script:
    """For every slot and position, the draft id that is proposed there, or must not be.

    width: positions from 0. draft_to_target i64 [Vd]: a token that it lacks can not be proposed.
    Empty at first: then, and behind the end of a text, draft id 0 is never proposed.
    """

    def __init__(
        self, batch: int, width: int, draft_to_target: Tensor, vocab: int, device: torch.device
    ) -> None:
        known = draft_to_target.cpu()
        self._draft_id = torch.full((vocab,), -1).index_copy(0, known, torch.arange(len(known)))
        self._device = device
        self.ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.logits = torch.full((batch, width), NEVER, device=device)

    def write(self, texts: Sequence[Sequence[int]], share: float, *, seed: int = 0) -> None:
        """texts: of each slot, prompt and answer. share: of the positions where the draft is right."""
        tokens = torch.full(self.ids.shape, -1)
        for slot, text in enumerate(texts):
            tokens[slot, : len(text)] = torch.tensor(text[: tokens.shape[1]])
        ids = torch.where(tokens >= 0, self._draft_id[tokens.clamp(min=0)], -1)  # [B, W]
        slots, positions = torch.arange(len(ids))[:, None], torch.arange(ids.shape[1])
        right = (uniform(torch.tensor(seed), slots, positions) < share) & (ids >= 0)
        with on_stream(self._device):
            self.ids.copy_(ids.clamp(min=0))
            self.logits.copy_(torch.where(right, LIKELY, NEVER))
        wait(self._device)


class ScriptedDraft:
    """`draft` with its logits changed by `script`, unless the batch is another (in a prefill)."""

    def __init__(self, draft: Graph, script: Script) -> None:
        self._draft = draft
        self._script = script

    @property
    def spec(self) -> GraphSpec:
        return self._draft.spec

    @property
    def capturable(self) -> bool:
        return self._draft.capturable

    def bind(self, tensors: Mapping[str, Tensor], *, shared: bool = False) -> Run:
        run, script = self._draft.bind(tensors, shared=shared), self._script
        position, rows, logits = (tensors[name] for name in ("position_ids", "logits_index", "logits"))
        if len(logits) != len(script.ids):
            return run

        def scripted() -> None:
            run()
            # The pair at t holds the token at t + 1, so its logits are of the token at t + 2.
            place = position.gather(1, rows) + 2  # [B, R]
            ids, values = script.ids.gather(1, place), script.logits.gather(1, place)
            logits.scatter_(2, ids[:, :, None], values[:, :, None])

        return scripted
