"""Which conversations share a batch: a pure function of lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WINDOW = 16  # batches whose conversations are sorted by length together


def split(count: int, validation: int, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the conversations to train on and of those held out (at most a tenth), both int64."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = min(validation, count // 10)
    return order[held:].sort().values, order[:held].sort().values


def pack(lengths: Tensor, numbers: Tensor, batch_tokens: int) -> list[list[int]]:
    """Conversations in batches of at most `batch_tokens` places, padding included; in the order given.

    lengths int64 [n] by number. A conversation that is longer than that is a batch by itself.
    """
    batches: list[list[int]] = []
    longest = 0
    for number in numbers.tolist():
        length = int(lengths[number])
        longest = max(longest, length)
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = length
        batches[-1].append(number)
    return batches


def epoch_batches(
    lengths: Tensor, numbers: Tensor, batch_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """The batches of an epoch, shuffled; conversations of similar lengths share one, so little is padding."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = numbers[torch.randperm(len(numbers), generator=generator)]
    mean = max(1.0, float(lengths[numbers].float().mean()))
    window = max(1, int(_WINDOW * batch_tokens / mean))
    parts = [part[lengths[part].argsort(stable=True)] for part in order.split(window)]
    batches = pack(lengths, torch.cat(parts), batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def share(batches: Sequence[list[int]], rank: int, workers: int) -> list[list[int]]:
    """One worker's batches; all get the same number of them, so that none waits for another at the end."""
    return [batches[i] for i in range(rank, len(batches) - len(batches) % workers, workers)]
