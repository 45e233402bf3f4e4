"""How long a forward of each graph takes, by its rows: what `--tree auto` predicts from."""

from __future__ import annotations

import time
from functools import partial

import torch

from eagle_run.backends.stream import on_stream, wait
from eagle_run.engine.cuda_graphs import CapturedRounds, Function
from eagle_run.engine.model_runner import Session
from eagle_run.engine.prefill import kv_bucket

_ROWS = {"target": (1, 2, 4, 8, 16, 32), "draft": (1, 2, 4, 8), "fuse": (2, 4, 8)}


def forward_seconds(session: Session, graph: str, most: int, *, capture: bool) -> dict[int, float]:
    """Least seconds of a few forwards by rows, over a few hundred cached tokens: what else runs only adds.

    `graph` is "target" or "draft", `most` the rows that a forward may have. `capture`: as CUDA graphs, like
    the rounds that they will be part of.
    """
    kv = kv_bucket(256, session.cache_rows)
    found = {}
    for rows in _ROWS[graph]:
        if rows > most:
            break
        with on_stream(session.device):  # engines ask when they are bound whether it can be captured
            forward = getattr(session, graph)(rows, 1 if graph == "draft" else rows, kv)
            for name, tensor in forward.inputs.items():
                if not name.startswith("past_"):  # those are the cache itself
                    tensor.fill_(name == "tree_mask")
        found[rows] = _least_seconds(session, forward.run, capture)
    return found


def fuse_seconds(session: Session, *, capture: bool) -> dict[int, float]:
    """The same of the fuse graph, over the rows of a prime; empty for a head without one."""
    if "fuse" not in session.graphs:
        return {}
    found = {}
    for rows in _ROWS["fuse"]:
        with on_stream(session.device):
            features = torch.zeros(session.batch, rows, session.feature_size, device=session.device)
        found[rows] = _least_seconds(session, partial(session.fuse, features), capture)
    return found


def _least_seconds(session: Session, run: Function, capture: bool) -> float:
    rounds = CapturedRounds(session.device, enabled=capture and session.capturable)

    def once() -> float:
        start = time.perf_counter()
        rounds.run("forward", run)
        wait(session.device)
        return time.perf_counter() - start

    first = once()  # binds and warms up; it also says how many more there is time for
    best = min(once() for _ in range(max(2, min(6, int(0.5 / first)))))
    rounds.clear()
    return best
