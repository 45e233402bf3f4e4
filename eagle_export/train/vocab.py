"""The draft vocabulary: the tokens that the target's answers use most, and the maps d2t and t2d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_export.train.samples import Samples


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """ids: int64 [Vd], target ids in ascending order. coverage: share of the answers' tokens among them."""

    ids: Tensor
    vocab_size: int
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """int64 [Vd]: target id minus draft id, as checkpoints store it."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """bool [V]: whether a target id is in the draft vocabulary."""
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, self.ids, True)

    def own(self) -> Tensor:
        """int64 [V]: draft id of each target id, -1 where it has none."""
        own = torch.full((self.vocab_size,), -1)
        own[self.ids] = torch.arange(len(self.ids))
        return own


def choose_vocabulary(
    samples: Samples, size: int, vocab_size: int, always: Sequence[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent tokens of the answers; ties go to the smaller id.

    always: ids that are in it whatever their count, such as the end of an answer. Not more than `vocab_size`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for shard in samples.shards:
        counts += torch.bincount(shard.tokens[shard.answers].long(), minlength=vocab_size)
    rank = counts.clone()
    rank[list(always)] = int(counts.sum()) + 1
    size = min(size, vocab_size)
    ids = rank.sort(descending=True, stable=True).indices[:size].sort().values
    coverage = float(counts[ids].sum()) / max(1, int(counts.sum()))
    return DraftVocabulary(ids, vocab_size, coverage)


def vocabulary_of(draft_to_target: Tensor, samples: Samples, vocab_size: int) -> DraftVocabulary:
    """The vocabulary of a head that is trained further, in that head's own order."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for shard in samples.shards:
        counts += torch.bincount(shard.tokens[shard.answers].long(), minlength=vocab_size)
    coverage = float(counts[draft_to_target].sum()) / max(1, int(counts.sum()))
    return DraftVocabulary(draft_to_target, vocab_size, coverage)
