"""The one CUDA stream that everything runs on: graphs, the operations between them, copies to the host.

One stream means that order of issue is order of execution: nothing in the runtime waits for anything on the
device. It is not the default stream, which cannot be captured and which makes TensorRT synchronise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of a GPU, the same one at every call; None for a device that has no streams."""
    if device.type != "cuda":
        return None
    return _stream(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Makes it torch's current stream. Not to be held across a `yield` to a caller, who has streams too."""
    stream = stream_of(device)
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def wait(device: torch.device) -> None:
    """Blocks until everything issued so far is done."""
    if (stream := stream_of(device)) is not None:
        stream.synchronize()
