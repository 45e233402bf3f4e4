"""Loads an engine from a bundle: files checked, graphs loaded, the tokenizer read, ready to decode."""

from __future__ import annotations

import os

import torch

from eagle_run.backends.environment import thread_count
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.engine import Engine
from eagle_run.engine.graph_loading import Log, load_graphs
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.validation import EngineLimits
from eagle_run.errors import UsageError
from eagle_run.tokenizer import Tokenizer


def load_engine(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    device: str = "auto",
    batch: int = 1,
    threads: int = 0,
    with_draft: bool = True,
    cuda_graphs: bool = True,
    async_scheduling: bool | None = None,
    log: Log | None = None,
) -> Engine:
    """An engine for the bundle at `path`, whose hashes are verified. It decodes plainly until told otherwise.

    `backend` and `device` are those of `load_graphs`; `threads` is the number inside an operator of ONNX
    Runtime on a CPU (0: one per core); `batch` is how many sequences decode side by side. Without
    `with_draft` only plain decoding is possible, and the draft's memory is saved. `cuda_graphs`: on a GPU
    rounds are captured and replayed, where the backend allows it. `log` is told what the user should know.
    Raises EagleError for a bad bundle and for what this machine lacks.
    """
    thread_count(threads)  # refused before anything is read
    bundle = load_bundle(os.fspath(path))
    limits = bundle.manifest.limits
    if not 1 <= batch <= limits.max_batch:
        raise UsageError(
            f"batch is {batch}; this bundle was built for 1 to {limits.max_batch}",
            hint="give a smaller batch, or build the bundle for larger ones",
            parameters=["batch", "max_batch"],
        )
    has_head = with_draft and bundle.manifest.head is not None
    loaded = load_graphs(
        bundle, backend=backend, device=device, threads=threads, with_draft=with_draft, log=log
    )
    runner = ModelRunner(
        loaded.graphs,
        batch=batch,
        draft_to_target=_draft_vocabulary(bundle) if has_head else None,
        device=loaded.device,
        precision=loaded.precision,
    )
    engine = assemble_engine(
        bundle,
        runner,
        backend=loaded.backend,
        threads=threads,
        cuda_graphs=cuda_graphs,
        async_scheduling=async_scheduling,
        log=log,
    )
    bundle.check_unchanged()
    return engine


def assemble_engine(
    bundle: Bundle,
    runner: ModelRunner,
    *,
    backend: str,
    threads: int,
    cuda_graphs: bool = True,
    async_scheduling: bool | None = None,
    log: Log | None = None,
) -> Engine:
    """An engine that decodes in `runner`, with the bundle's limits and tokenizer."""
    limits = bundle.manifest.limits
    return Engine(
        runner,
        EngineLimits(limits.max_seq_len, limits.prefill_chunk, limits.max_tree_nodes),
        tokenizer=Tokenizer.load(bundle.tokenizer_dir),
        stop_token_ids=bundle.manifest.stop_token_ids,
        cuda_graphs=CudaGraphRunner(runner.device, enabled=cuda_graphs, log=log),
        async_scheduling=async_scheduling,
        single_thread=True,
        bundle=bundle,
        backend=backend,
        threads=threads,
    )


def _draft_vocabulary(bundle: Bundle) -> torch.Tensor:
    """Target id of each draft id, i64 [Vd]."""
    table = bundle.vocab_map()
    return torch.arange(bundle.manifest.target.vocab_size) if table is None else table
