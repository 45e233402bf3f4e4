"""How long a forward of each graph takes, by its rows: what the tree "auto" predicts from."""

from __future__ import annotations

import time
from functools import partial

import torch

from eagle_run.backends.stream import on_stream, wait
from eagle_run.engine.cuda_graphs import CudaGraphRunner, Function
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.prefill import kv_bucket

_ROWS = {"target": (1, 2, 4, 8, 16, 32), "draft": (1, 2, 4, 8), "fuse": (2, 4, 8)}


def forward_seconds(runner: ModelRunner, graph: str, most: int, *, capture: bool) -> dict[int, float]:
    """Least seconds of a few forwards by rows, over a few hundred cached tokens: what else runs only adds.

    `graph` is "target" or "draft", `most` the rows that a forward may have. `capture`: as CUDA graphs, like
    the rounds that they will be part of.
    """
    kv = kv_bucket(256, runner.cache_rows)
    found = {}
    for rows in _ROWS[graph]:
        if rows > most:
            break
        with on_stream(runner.device):  # engines ask when they are bound whether it can be captured
            forward = getattr(runner, graph)(rows, 1 if graph == "draft" else rows, kv)
            for name, tensor in forward.inputs.items():
                if not name.startswith("past_"):  # those are the cache itself
                    tensor.fill_(name == "tree_mask")
        found[rows] = _least_seconds(runner, forward.run, capture)
    return found


def fuse_seconds(runner: ModelRunner, *, capture: bool) -> dict[int, float]:
    """The same of the fuse graph, over the rows of a prime; empty for a head without one."""
    if "fuse" not in runner.graphs:
        return {}
    found = {}
    for rows in _ROWS["fuse"]:
        with on_stream(runner.device):
            features = torch.zeros(runner.batch, rows, runner.feature_size, device=runner.device)
        found[rows] = _least_seconds(runner, partial(runner.fuse, features), capture)
    return found


def _least_seconds(runner: ModelRunner, run: Function, capture: bool) -> float:
    rounds = CudaGraphRunner(runner.device, enabled=capture and runner.capturable)

    def once() -> float:
        start = time.perf_counter()
        rounds.run("forward", run)
        wait(runner.device)
        return time.perf_counter() - start

    first = once()  # binds and warms up; it also says how many more there is time for
    best = min(once() for _ in range(max(2, min(6, int(0.5 / first)))))
    rounds.clear()
    return best
