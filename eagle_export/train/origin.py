"""Did this target write the data? Asked where the data does not say: the target judges a sample of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eagle_export.train.features import OnTheFly, TargetFeatures
from eagle_export.train.samples import Samples

_SAMPLE = 16  # conversations
_BATCH = 4
# SmolLM2 finds 56 % of what it said at temperature 1 its own first choice, and 10 to 21 % of conversations
# whose ids were shuffled: what repeats can be foretold in any ids.
_OWN = 0.3


def check_origin(
    samples: Samples, target: TargetFeatures, max_length: int, note: Callable[[str], None]
) -> None:
    """Tells the user about shards that name no target: how much of them this one would have said itself."""
    unsigned = [n for n in range(len(samples)) if not samples.shards[samples.where(n)[0]].signed]
    if not unsigned:
        return
    hits, rows = agreement(samples, unsigned[:: -(-len(unsigned) // _SAMPLE)], target, max_length)
    if not rows:
        return
    share = hits / rows
    files = sorted({shard.name.partition("[")[0] for shard in samples.shards if not shard.signed})
    names = ", ".join(files[:3]) + (" and more" if len(files) > 3 else "")
    note(
        f"{names}: does not say which target wrote it. Its ids fit the vocabulary, and of {rows:,} tokens of "
        f"its answers {share:.0%} are this target's own first choice"
    )
    if share < _OWN:
        note(
            "warning: that is what the words of another model or another tokenizer look like, and a head "
            "learns what its data says; make data with `eagle-export data`"
        )


def agreement(
    samples: Samples, numbers: list[int], target: TargetFeatures, max_length: int
) -> tuple[int, int]:
    """Of the tokens of these conversations' answers: how many are the target's most likely ones, and all."""
    source, hits, rows = OnTheFly(samples, target, max_length), 0, 0
    for first in range(0, len(numbers), _BATCH):
        batch = source.batch(numbers[first : first + _BATCH], torch.device("cpu"))
        asked = batch.answers[:, 1:]
        hits += int((asked & (batch.best[:, :-1] == batch.tokens[:, 1:])).sum())
        rows += int(asked.sum())
    return hits, rows
