"""What a precision costs: a bundle's graphs against the same weights in float32, on real text.

Two questions. Does the target still say the same (top-1 agreement, KL, perplexity; teacher-forced, so that
one changed token does not make everything after it count)? And does its draft still guess as well (tokens
per round, decoding freely)?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from eagle_export.progress import Progress
from eagle_export.reference.modules import Modules, eager_graphs
from eagle_run.backends.base import Graph
from eagle_run.bundle.manifest import Limits
from eagle_run.bundle.records import AccuracyInfo
from eagle_run.datasets import read_questions
from eagle_run.decoding.config import PLAIN, SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.offline import OfflineRequest, run_offline
from eagle_run.engine.prefill import fill, kv_bucket
from eagle_run.engine.validation import EngineLimits
from eagle_run.errors import EagleError
from eagle_run.metrics import Metrics, total_metrics
from eagle_run.params import SamplingParams

if TYPE_CHECKING:
    from eagle_run.tokenizer import Tokenizer

Backend = Literal["onnxruntime", "eager"]

ANSWER_TOKENS = 48
_BATCH = 4  # prompts decoded side by side
_ROWS = 64  # tokens in one teacher-forced forward: bounds the logits held at once
_SLICE = 16  # rows of logits turned into float64 probabilities at once


@dataclass
class _Sums:
    """Over the compared positions: counts and sums in float64."""

    tokens: int = 0
    agreed: int = 0
    kl: float = 0.0
    nll: float = 0.0
    reference_nll: float = 0.0


def choose_requests(
    tokenizer: Tokenizer,
    stop_token_ids: Sequence[int],
    *,
    max_seq_len: int,
    questions: Path | None = None,
    limit: int | None = None,
    max_tokens: int = ANSWER_TOKENS,
) -> list[OfflineRequest]:
    """Prompts to measure on: the first turns of a file of questions, or our own; greedy.

    `limit` takes the first ones; the chat template is applied where there is one. Of our own prompts those
    that the context has no room for are left out. Raises EagleError for an unreadable file, and when nothing
    is left.
    """
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, stop_token_ids=stop_token_ids, detokenize=False
    )
    raw = tokenizer.chat_template is None
    prompts = [tuple(tokenizer.encode_prompt(text, raw=raw)) for text in _texts(questions, limit)]
    if questions is None:
        prompts = [prompt for prompt in prompts if len(prompt) < max_seq_len]
    if not prompts:
        raise EagleError(
            f"the bundle's context of {max_seq_len} tokens is too short for the built-in prompts",
            hint="give shorter ones",
            parameters=["prompts"],
        )
    return [OfflineRequest(prompt, params) for prompt in prompts]


def _texts(questions: Path | None, limit: int | None) -> Sequence[str]:
    if questions is not None:
        return [question.turns[0] for question in read_questions(questions, limit=limit or 0)]
    from eagle_export.prompts import PROMPTS

    return PROMPTS[:limit]


def runnable_graphs(
    files: Mapping[str, Path], modules: Modules, precision: str, cache_rows: int, *, threads: int = 0
) -> tuple[dict[str, Graph], Backend]:
    """What stands for a bundle's ONNX `files` (by graph name) on this machine's CPU, and what runs it.

    ONNX Runtime has no bfloat16 kernels on CPUs; there the modules that were exported, eager in bfloat16,
    take the graphs' place. `modules` are used for bf16 alone, and are in it.
    """
    from eagle_run.backends.onnxruntime import OnnxRuntimeGraph

    if precision == "bf16":
        return eager_graphs(modules, cache_rows), "eager"
    return {
        name: OnnxRuntimeGraph(file, name, threads=threads) for name, file in files.items()
    }, "onnxruntime"


def measure(
    graphs: Mapping[str, Graph],
    reference: Modules,
    requests: Sequence[OfflineRequest],
    progress: Progress,
    *,
    limits: Limits,
    tree: TreeShape | None,
    backend: Backend = "onnxruntime",
) -> AccuracyInfo:
    """Compares `graphs` (target, and draft and fuse if there is a head) with `reference`, in float32.

    The reference answers `requests` greedily; then both see prompt and answer. Compared are the positions
    that predict a token of an answer or of a prompt, but for what all prompts begin and end with (else the
    chat template would count once a prompt). `tree` is the bundle's own, None without a head; `backend` is
    what runs `graphs`, for the record.

    Memory: the caches of four sequences of either side, and the logits of 64 rows. Raises EagleError for
    prompts that do not fit the limits.
    """
    speculative = PLAIN if tree is None else SpeculativeConfig(tree)
    chunk, batch = min(_ROWS, limits.prefill_chunk), min(_BATCH, limits.max_batch, len(requests))
    lengths = [len(each.prompt_token_ids) + (each.params.max_tokens or 0) for each in requests]
    longest = max(min(length, limits.max_seq_len) for length in lengths)
    wide = eager_graphs(reference, longest + max(chunk, speculative.tree.cache_rows))
    answers: list[tuple[int, ...]] = []
    expected: list[Metrics] = []
    actual: list[Metrics] = []
    groups = [requests[i : i + batch] for i in range(0, len(requests), batch)]

    def engine_of(side: Mapping[str, Graph], *, single_thread: bool = False) -> Engine:
        runner = ModelRunner(side, batch=batch, draft_to_target=reference.draft_to_target)
        return Engine(runner, EngineLimits(longest, chunk), single_thread=single_thread)

    engine = engine_of(wide)
    for group in progress.track(groups, "answer in float32"):
        run = run_offline(engine, group, speculative)
        answers += run.token_ids
        expected.append(run.metrics)
    if tree is not None:
        engine = engine_of(graphs, single_thread=backend == "onnxruntime")
        for group in progress.track(groups, "answer in the bundle's precision"):
            actual.append(run_offline(engine, group, speculative).metrics)
    del engine  # and its caches

    sums = _Sums()
    runners = [ModelRunner({"target": side["target"]}, batch=1) for side in (graphs, wide)]
    pairs = list(zip(requests, answers, _own_text(requests), strict=True))
    for request, answer, own in progress.track(pairs, "compare with float32"):
        tokens = torch.tensor([*request.prompt_token_ids, *answer])
        place = torch.arange(len(tokens))
        counted = (place >= own.start) & (place < own.stop) | (place >= len(request.prompt_token_ids))
        _compare(runners, tokens, counted, chunk, sums)
    return AccuracyInfo(
        backend=backend,
        prompts=len(requests),
        tokens=sums.tokens,
        top1_agreement=sums.agreed / sums.tokens,
        kl=max(sums.kl / sums.tokens, 0.0),
        perplexity=math.exp(sums.nll / sums.tokens),
        reference_perplexity=math.exp(sums.reference_nll / sums.tokens),
        tokens_per_round=None if tree is None else total_metrics(actual).tokens_per_round,
        reference_tokens_per_round=None if tree is None else total_metrics(expected).tokens_per_round,
    )


def _own_text(requests: Sequence[OfflineRequest]) -> list[range]:
    """Where each prompt's own text is: between what all prompts begin and what all end with.

    A single prompt is its own text altogether. The first token of all is predicted by none.
    """
    prompts = [request.prompt_token_ids for request in requests]
    shortest = min(len(prompt) for prompt in prompts)
    head = tail = 0
    if len(prompts) > 1:
        while head < shortest and len({prompt[head] for prompt in prompts}) == 1:
            head += 1
        while head + tail < shortest and len({prompt[-1 - tail] for prompt in prompts}) == 1:
            tail += 1
    return [range(max(head, 1), len(prompt) - tail) for prompt in prompts]


def _compare(
    runners: Sequence[ModelRunner], tokens: Tensor, counted: Tensor, chunk: int, sums: _Sums
) -> None:
    """Teacher-forces tokens i64 [n] through both targets, `chunk` rows at a time; counted bool [n]."""
    for start in range(0, len(tokens) - 1, chunk):
        after = tokens[start + 1 : start + chunk + 1]
        rows = counted[start + 1 : start + chunk + 1].nonzero()[:, 0]
        logits = [_forward(runner, tokens, start, chunk) for runner in runners]  # [chunk, V] each
        for some in rows.split(_SLICE):
            found, wanted = (side[some].double().log_softmax(-1) for side in logits)
            _add(found, wanted, after[some], sums)


def _forward(runner: ModelRunner, tokens: Tensor, start: int, rows: int) -> Tensor:
    """Logits f32 [rows, V] of the tokens from `start` on; rows behind the last token are padding."""
    kv = kv_bucket(start + rows, runner.cache_rows)
    forward = runner.target(rows, rows, kv)
    step = torch.arange(rows)
    ids = torch.zeros(rows, dtype=torch.int64)
    here = tokens[start : start + rows]
    ids[: len(here)] = here
    fill(
        forward.inputs,
        input_ids=ids[None],
        position_ids=(start + step)[None],
        write_index=torch.tensor([start]),
        logits_index=step[None],
        tree_mask=(torch.arange(kv) <= (start + step)[:, None])[None, None],
    )
    forward.run()
    return forward.outputs["logits"][0]


def _add(found: Tensor, wanted: Tensor, after: Tensor, sums: _Sums) -> None:
    """Log-probabilities f64 [n, V] of both, and the tokens i64 [n] that followed."""
    sums.tokens += len(after)
    sums.agreed += int((found.argmax(-1) == wanted.argmax(-1)).sum())
    sums.kl += float((wanted.exp() * (wanted - found)).sum())
    sums.nll -= float(found.gather(1, after[:, None]).sum())
    sums.reference_nll -= float(wanted.gather(1, after[:, None]).sum())
