"""What a round emitted, on its way to the host: copied behind the round, read when the host gets to it.

With pinned memory the copy waits for nothing, so the host may issue the next round before it reads this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from eagle_run.engine.model_runner import BatchState


@dataclass(frozen=True)
class TokenLogprob:
    """Of one emitted token: its log-probability and rank, and (id, log-probability) of the likeliest ones."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SlotOutput:
    """What a round emitted in one slot. `logprobs` goes with `token_ids`, None where nobody asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


Read = Callable[[], list[SlotOutput]]


class AsyncOutput:
    """Takes the outputs of up to `depth` rounds before the first of them has been read."""

    def __init__(self, device: torch.device, *, depth: int) -> None:
        self._cuda = device.type == "cuda"
        self.depth = depth
        self._turns = cycle(range(depth))
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def send(self, state: BatchState) -> Read:
        """Starts the copy of what the last round left in `state` on the current stream.

        The returned call waits for it and gives the output of every slot. It is to be called before `depth`
        more rounds are sent.
        """
        tensors = [state.emitted]
        if (logprobs := state.logprobs) is not None:
            tensors += [logprobs.chosen, logprobs.rank, logprobs.top, logprobs.top_ids]
        if self.depth == 1 and not self._cuda:  # it is read before the next round begins
            return partial(_slot_outputs, tensors)
        turn = next(self._turns)
        copies = [self._copy((turn, number), tensor) for number, tensor in enumerate(tensors)]
        done = None
        if self._cuda:
            done = torch.cuda.Event()
            done.record()

        def read() -> list[SlotOutput]:
            if done is not None:
                done.synchronize()
            return _slot_outputs(copies)

        return read

    def _copy(self, key: tuple[int, int], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda)
            self._buffers[key] = buffer
        buffer.copy_(tensor, non_blocking=True)
        return buffer


def _slot_outputs(tensors: Sequence[Tensor]) -> list[SlotOutput]:
    emitted, *logprobs = (tensor.tolist() for tensor in tensors)
    outputs = []
    for slot, (length, *token_ids) in enumerate(emitted):
        rows = None
        if logprobs:
            chosen, rank, top, top_ids = (values[slot] for values in logprobs)
            rows = [
                TokenLogprob(chosen[i], rank[i], tuple(zip(top_ids[i], top[i], strict=True)))
                for i in range(length)
            ]
        outputs.append(SlotOutput(token_ids[:length], rows))
    return outputs
