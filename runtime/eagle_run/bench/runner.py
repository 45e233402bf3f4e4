"""Speculative against plain decoding on a set of questions: interleaved, compared token by token.

All figures are of decoding; prefill is reported apart, since both kinds of decoding share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle_run.backends.environment import environment
from eagle_run.bench.result import BenchResult, Pair
from eagle_run.datasets import Question
from eagle_run.decoding.sampling import SamplingParams
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.mismatch import Mismatch, find_mismatch
from eagle_run.engine.opening import Decoded, Engine
from eagle_run.engine.request import Request
from eagle_run.errors import EagleError, UsageError


def bench(
    engine: Engine,
    questions: Sequence[Question],
    tree: TreeShape,
    sampling: SamplingParams | None = None,
    *,
    rule: str = "topk",
    max_new_tokens: int = 128,
    repeat: int = 1,
    ignore_eos: bool = False,
    raw: bool = False,
    progress: Callable[[int, float], None] | None = None,
) -> BenchResult:
    """Answers every turn of every question with plain decoding and with `tree`, and compares.

    Each group of `engine.batch` questions runs both ways before the next begins, and which goes first
    alternates, so that a machine that slows down slows both. A warm-up is not counted. The second turn of
    a question follows plain decoding's answer to the first; turns that no longer fit the context are
    skipped and counted. `progress` is told (pairs done, speed-up so far). Raises UsageError when there is
    nothing to compare and EagleError when a first turn does not fit.
    """
    if not questions or repeat < 1:
        raise UsageError(f"nothing to measure: {len(questions)} questions, {repeat} repeats")
    options = {
        "sampling": sampling or SamplingParams(),
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
    }
    run = _Runner(engine, tree, rule, repeat, raw, options)
    run.check(questions)
    run.warm_up(questions[0])
    result = BenchResult(
        bundle=engine.bundle.manifest.name,
        backend=engine.backend,
        device=engine.device,
        precision=engine.precision,
        batch=engine.batch,
        tree=tree,
        rule=rule,
        sampling=sampling or SamplingParams(),
        max_new_tokens=max_new_tokens,
        environment=environment(engine.threads),
    )
    for first in range(0, len(questions), engine.batch):
        for pair in run.group(questions[first : first + engine.batch]):
            result.pairs.append(pair)
            if progress:
                progress(len(result.pairs), result.speedup)
    return replace(result, skipped_turns=run.skipped, captures=_captures(engine))


def _captures(engine: Engine) -> dict[str, Any] | None:
    """What CUDA graphs the run made, None where rounds are not captured."""
    rounds = engine.decoder.rounds
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
    tree: TreeShape
    rule: str
    repeat: int
    raw: bool
    options: dict[str, Any]
    decodings: int = 0
    skipped: int = 0

    def check(self, questions: Sequence[Question]) -> None:
        """Before anything runs: does every first turn fit?"""
        most = self.engine.decoder.max_seq_len
        for question in questions:
            request = self._request([], question.turns[0])
            if not self._fits(request):
                raise EagleError(
                    f"question {question.id} has {len(request.prompt)} tokens; the context is {most}, "
                    "the answer included",
                    hint="leave it out, or build the bundle with a larger --max-seq-len",
                )

    def warm_up(self, question: Question) -> None:
        """Loads weights, binds shapes and wakes the cores: nothing that a measurement should pay for."""
        request = self._request([], question.turns[0])
        short = replace(request, max_new_tokens=min(16, request.max_new_tokens))
        for shape in (TreeShape.plain(), self.tree):
            self.engine.decode([short] * self.engine.batch, shape, rule=self.rule)

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
            pair = self._pair([requests[i] for i in places], [questions[i] for i in places], turn)
            for i, answer in zip(places, pair.plain[0].answers, strict=True):
                histories[i] += [
                    {"role": "user", "content": questions[i].turns[turn]},
                    {"role": "assistant", "content": answer.text},
                ]
            yield pair

    def _request(self, history: list[dict[str, str]], text: str) -> Request:
        if history:
            return self.engine.request([*history, {"role": "user", "content": text}], **self.options)
        return self.engine.request(text, raw=self.raw, **self.options)

    def _fits(self, request: Request) -> bool:
        return len(request.prompt) < self.engine.decoder.max_seq_len

    def _pair(self, requests: list[Request], questions: list[Question], turn: int) -> Pair:
        runs: tuple[list[Decoded], list[Decoded]] = ([], [])
        for _ in range(self.repeat):
            both = [(runs[0], TreeShape.plain()), (runs[1], self.tree)]
            self.decodings += 1
            for run, shape in both if self.decodings % 2 else reversed(both):
                run.append(self.engine.decode(requests, shape, rule=self.rule))
        plain, speculative = runs
        for same in runs:
            if any(again.tokens != same[0].tokens for again in same[1:]):
                raise EagleError(
                    f"question {questions[0].id}: the same run gave other tokens the second time"
                )
        return Pair(
            questions=tuple(questions),
            turn=turn,
            plain=tuple(plain),
            speculative=tuple(speculative),
            mismatches=tuple(self._mismatches(requests, plain[0], speculative[0])),
        )

    def _mismatches(
        self, requests: list[Request], plain: Decoded, speculative: Decoded
    ) -> Iterator[tuple[int, Mismatch]]:
        if self.rule == "sampled" and self.options["sampling"].temperature > 0:
            return  # both are draws from p, but not with the same coins
        decoder = self.engine.decoder
        for place, request in enumerate(requests):
            expected, found = plain.answers[place].tokens, speculative.answers[place].tokens
            mismatch = find_mismatch(decoder.runner, request, expected, found, chunk=decoder.chunk)
            if mismatch:
                yield place, mismatch
