"""What a round emitted, on its way to the host: copied behind the round, read when the host gets to it.

With pinned memory the copy waits for nothing, so the host may issue the next round before it reads this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

Read = Callable[[], list[list[int]]]


class Handover:
    """Takes the reports of up to `depth` rounds before the first of them has been read."""

    def __init__(self, device: torch.device, *, depth: int) -> None:
        self._cuda = device.type == "cuda"
        self._depth = depth
        self._places = cycle(range(depth))
        self._buffers: list[Tensor | None] = [None] * depth

    def send(self, report: Tensor) -> Read:
        """Starts the copy of `report` i64 [B, 1 + P] (path length, then tokens) on the current stream.

        The returned call waits for it and gives the emitted tokens of every slot. It is to be called before
        `depth` more reports are sent.
        """
        if self._depth == 1 and not self._cuda:  # it is read before the next round begins
            return partial(_emitted, report)
        place = next(self._places)
        buffer = self._buffers[place]
        if buffer is None or buffer.shape != report.shape:
            buffer = torch.empty(report.shape, dtype=report.dtype, pin_memory=self._cuda)
            self._buffers[place] = buffer
        buffer.copy_(report, non_blocking=True)
        done = None
        if self._cuda:
            done = torch.cuda.Event()
            done.record()

        def read(report: Tensor = buffer) -> list[list[int]]:
            if done is not None:
                done.synchronize()
            return _emitted(report)

        return read


def _emitted(report: Tensor) -> list[list[int]]:
    return [tokens[:length] for length, *tokens in report.tolist()]
