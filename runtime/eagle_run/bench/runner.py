"""Speculative against plain decoding on a set of questions: interleaved, compared token by token.

All figures are of decoding; prefill is reported apart, since both kinds of decoding share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle_run.backends.environment import environment
from eagle_run.bench.checkpoint import Checkpoint
from eagle_run.bench.mismatch import Mismatch, find_mismatch
from eagle_run.bench.result import BenchResult, BenchRun, Pair
from eagle_run.datasets import Question
from eagle_run.decoding.config import PLAIN, AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.tree_spec import spec_of
from eagle_run.engine.engine import Engine
from eagle_run.engine.offline import OfflineRequest, OfflineRun, run_offline
from eagle_run.errors import EagleError, UsageError
from eagle_run.llm import LLM
from eagle_run.params import SamplingParams
from eagle_run.tokenizer import Tokenizer


def bench(
    llm: LLM,
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    speculative: SpeculativeConfig | None = None,
    repeat: int = 1,
    raw: bool = False,
    resume: Path | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> BenchResult:
    """Answers every turn of every question with plain decoding and with `speculative`, and compares.

    `speculative` is by default what the LLM was made with. Each group of `batch` questions runs both ways
    before the next begins, and which goes first alternates, so that a machine that slows down slows both. A
    warm-up is not counted. The second turn of a question follows plain decoding's answer to the first; turns
    that no longer fit the context are skipped and counted. `progress` is told (pairs done, speed-up so far).
    `resume` is a file that keeps what is measured: with the same file, questions and settings an interrupted
    run goes on from there. Raises UsageError when there is nothing to compare and EagleError when a first
    turn does not fit.
    """
    if not questions or repeat < 1:
        raise UsageError(f"nothing to measure: {len(questions)} questions, {repeat} repeats")
    engine = llm.engine
    assert engine.bundle is not None  # an LLM has one
    speculative = speculative or engine.speculative
    here = environment(engine.threads)
    identity = {
        "bundle": hashlib.sha256(engine.bundle.manifest.model_dump_json().encode()).hexdigest(),
        "backend": [engine.backend, engine.device, engine.runner.batch],
        "speculative": [spec_of(speculative.tree), str(speculative.acceptance)],
        "params": asdict(params),
        "repeat": repeat,
        "raw": raw,
        "environment": here,
    }
    run = _Runner(engine, llm.tokenizer, speculative, params, repeat, raw, Checkpoint(resume, identity))
    run.check(questions)
    run.warm_up(questions[0])
    result = BenchResult(
        bundle=engine.bundle.manifest.name,
        backend=engine.backend,
        device=engine.device,
        precision=engine.runner.precision,
        batch=engine.runner.batch,
        speculative=speculative,
        params=params,
        environment=here,
    )
    for first in range(0, len(questions), engine.runner.batch):
        for pair in run.group(questions[first : first + engine.runner.batch]):
            result.pairs.append(pair)
            if progress:
                progress(len(result.pairs), result.speedup)
    return replace(result, skipped_turns=run.skipped, captures=_captures(engine))


def _captures(engine: Engine) -> dict[str, Any] | None:
    """What CUDA graphs the run made, None where rounds are not captured."""
    rounds = engine.cuda_graphs
    if not rounds.replays:
        return None
    return {
        "graphs": len(rounds.captured),
        "bytes": rounds.memory_bytes,
        "replays": rounds.replays,
        "calls": rounds.calls,
    }


@dataclass
class _Runner:
    """What stays the same from one group of questions to the next."""

    engine: Engine
    tokenizer: Tokenizer
    speculative: SpeculativeConfig
    params: SamplingParams
    repeat: int
    raw: bool
    checkpoint: Checkpoint
    decodings: int = 0
    skipped: int = 0

    def check(self, questions: Sequence[Question]) -> None:
        """Before anything runs: does every first turn fit?"""
        most = self.engine.limits.max_seq_len
        for question in questions:
            request = self._request([], question.turns[0])
            if not self._fits(request):
                raise EagleError(
                    f"question {question.id} has {len(request.prompt_token_ids)} tokens; the context is "
                    f"{most}, the answer included",
                    hint="leave it out, or build the bundle with a larger context",
                    parameters=["max_seq_len"],
                )

    def warm_up(self, question: Question) -> None:
        """Loads weights, binds shapes and wakes the cores: nothing that a measurement should pay for."""
        requests = [self._request([], question.turns[0]).shortened(16)] * self.engine.runner.batch
        for speculative in (PLAIN, self.speculative):
            run_offline(self.engine, requests, speculative)

    def group(self, questions: Sequence[Question]) -> Iterator[Pair]:
        """All turns of up to `batch` questions."""
        histories: list[list[dict[str, str]]] = [[] for _ in questions]
        for turn in range(max(len(question.turns) for question in questions)):
            places = [i for i, question in enumerate(questions) if len(question.turns) > turn]
            requests = {i: self._request(histories[i], questions[i].turns[turn]) for i in places}
            if turn:
                places = [i for i in places if self._fits(requests[i])]
                self.skipped += len(requests) - len(places)
            if not places:
                continue
            asked = [questions[i] for i in places]
            pair = self.checkpoint.find(asked, turn)
            if pair is None:
                pair = self._pair([requests[i] for i in places], asked, turn)
                self.checkpoint.add(pair)
            else:
                self.decodings += self.repeat  # which way goes first next is as if it had been run
            for i, answer in zip(places, pair.answers, strict=True):
                histories[i] += [
                    {"role": "user", "content": questions[i].turns[turn]},
                    {"role": "assistant", "content": answer},
                ]
            yield pair

    def _request(self, history: list[dict[str, str]], text: str) -> OfflineRequest:
        if history:
            token_ids = self.tokenizer.encode_chat([*history, {"role": "user", "content": text}])
        else:
            token_ids = self.tokenizer.encode_prompt(text, raw=self.raw)
        return OfflineRequest(tuple(token_ids), self.params)

    def _fits(self, request: OfflineRequest) -> bool:
        return len(request.prompt_token_ids) < self.engine.limits.max_seq_len

    def _pair(self, requests: list[OfflineRequest], questions: list[Question], turn: int) -> Pair:
        runs: tuple[list[OfflineRun], list[OfflineRun]] = ([], [])
        for _ in range(self.repeat):
            both = [(runs[0], PLAIN), (runs[1], self.speculative)]
            self.decodings += 1
            for run, speculative_config in both if self.decodings % 2 else reversed(both):
                run.append(run_offline(self.engine, requests, speculative_config))
        plain, speculative = runs
        for same in runs:
            if any(again.token_ids != same[0].token_ids for again in same[1:]):
                raise EagleError(
                    f"question {questions[0].id}: the same run gave other tokens the second time"
                )
        return Pair(
            questions=tuple(questions),
            turn=turn,
            plain=tuple(BenchRun(run.metrics, tuple(run.round_times)) for run in plain),
            speculative=tuple(BenchRun(run.metrics, tuple(run.round_times)) for run in speculative),
            answers=tuple(output.outputs[0].text for output in plain[0].outputs),
            mismatches=tuple(self._mismatches(requests, plain[0], speculative[0])),
        )

    def _mismatches(
        self, requests: list[OfflineRequest], plain: OfflineRun, speculative: OfflineRun
    ) -> Iterator[tuple[int, Mismatch]]:
        if self.speculative.acceptance is AcceptanceRule.SAMPLED and self.params.temperature > 0:
            return  # both are draws from p, but not with the same coins
        for place, request in enumerate(requests):
            expected, actual = plain.token_ids[place], speculative.token_ids[place]
            mismatch = find_mismatch(self.engine, request, expected, actual)
            if mismatch:
                yield place, mismatch
