"""Speculative against plain decoding on a set of questions: interleaved, order alternating, compared token by token.

`bench` gives a BenchResult whose `report` is the JSON of `eagle-run bench`. All figures are of decoding; prefill
is reported apart, since both kinds of decoding share it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eagle_run import __version__
from eagle_run.dataset import Question
from eagle_run.engine import Decoded, Engine, RoundTime
from eagle_run.errors import EagleError, UsageError
from eagle_run.loop import Request, Stats
from eagle_run.mismatch import Mismatch, find_mismatch
from eagle_run.sampling import SamplingSettings
from eagle_run.tree import TreeShape

_LIBRARIES = ("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tokenizers")


@dataclass(frozen=True)
class Pair:
    """The same requests decoded both ways: `batch` questions at one turn, all repeats of them.

    Of repeats the first gives the counts (the tokens of all are the same, which is checked) and the median gives
    the seconds. `mismatches` are (place in the group, where the answers part).
    """

    questions: tuple[Question, ...]
    turn: int
    plain: tuple[Decoded, ...]
    speculative: tuple[Decoded, ...]
    mismatches: tuple[tuple[int, Mismatch], ...]

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return _rate([self.speculative]) / _rate([self.plain])

    def as_dict(self) -> dict[str, Any]:
        stats = self.speculative[0].stats
        return {
            "ids": [question.id for question in self.questions],
            "category": self.questions[0].category,
            "turn": self.turn,
            "prompt_tokens": stats.prompt_tokens,
            "tokens": stats.tokens,
            "plain_tokens_per_second": round(_rate([self.plain]), 3),
            "tokens_per_second": round(_rate([self.speculative]), 3),
            "speedup": round(self.speedup, 4),
            "tokens_per_round": round(stats.tokens_per_round, 4),
            "identical": not self.mismatches,
        }


@dataclass(frozen=True)
class BenchResult:
    """All pairs of a run, and under which settings they were made."""

    bundle: str
    backend: str
    device: str
    precision: str
    batch: int
    tree: TreeShape
    rule: str
    sampling: SamplingSettings
    max_new_tokens: int
    pairs: list[Pair] = field(default_factory=list)
    skipped_turns: int = 0
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Speculative tokens per second over all questions, over plain decoding's."""
        plain, speculative = self._runs()
        return _rate(speculative) / _rate(plain)

    @property
    def identical_outputs(self) -> float | None:
        """Share of answers that equal plain decoding's. None where they need not: sampled drafts at T > 0."""
        if self.rule == "sampled" and self.sampling.temperature > 0:
            return None
        answers = sum(len(pair.questions) for pair in self.pairs)
        return 1 - sum(len(pair.mismatches) for pair in self.pairs) / answers

    def report(self, *, per_prompt: bool = False) -> dict[str, Any]:
        """The JSON of design §7; `per_prompt` adds a line for every pair. Milliseconds are medians of rounds."""
        plain, speculative = self._runs()
        stats = merge([run[0].stats for run in speculative])
        ratios = [pair.speedup for pair in self.pairs]
        report: dict[str, Any] = {
            "bundle": self.bundle,
            "backend": self.backend,
            "device": self.device,
            "precision": self.precision,
            "batch": self.batch,
            "tree": self.tree.as_dict(),
            "draft": self.rule,
            "sampling": self.sampling.__dict__,
            "max_new_tokens": self.max_new_tokens,
            "prompts": len({question.id for pair in self.pairs for question in pair.questions}),
            "plain": _figures(plain),
            "speculative": {
                **_figures(speculative),
                "tokens_per_round": round(stats.tokens_per_round, 4),
                "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth],
            },
            "speedup": round(self.speedup, 4),
            "speedup_median": round(median(ratios), 4),
            "speedup_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "identical_outputs": self.identical_outputs,
            "mismatches": [
                {"id": pair.questions[place].id, "turn": pair.turn, **mismatch.as_dict()}
                for pair in self.pairs
                for place, mismatch in pair.mismatches
            ],
            "skipped_turns": self.skipped_turns,
            "environment": self.environment,
        }
        if per_prompt:
            report["per_prompt"] = [pair.as_dict() for pair in self.pairs]
        return report

    def _runs(self) -> tuple[list[tuple[Decoded, ...]], list[tuple[Decoded, ...]]]:
        if not self.pairs:
            raise EagleError("nothing was measured: no question fits the context of this bundle")
        return [pair.plain for pair in self.pairs], [pair.speculative for pair in self.pairs]


def bench(
    engine: Engine,
    questions: Sequence[Question],
    tree: TreeShape,
    sampling: SamplingSettings | None = None,
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
    alternates, so that a machine that slows down slows both. A warm-up is not counted. The second turn of a
    question follows plain decoding's answer to the first; turns that no longer fit the context are skipped and
    counted. `progress` is told (pairs done, speed-up so far). Raises UsageError when there is nothing to compare
    and EagleError when a first turn does not fit.
    """
    if not questions or repeat < 1:
        raise UsageError(f"nothing to measure: {len(questions)} questions, {repeat} repeats")
    options = {
        "sampling": sampling or SamplingSettings(),
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
    }
    run = _Runner(engine, tree, rule, repeat, raw, options)
    run.warm_up(questions[0])
    result = BenchResult(
        bundle=engine.bundle.manifest.name,
        backend=engine.backend,
        device=engine.device,
        precision=engine.precision,
        batch=engine.batch,
        tree=tree,
        rule=rule,
        sampling=sampling or SamplingSettings(),
        max_new_tokens=max_new_tokens,
        environment=environment(engine.threads),
    )
    for first in range(0, len(questions), engine.batch):
        for pair in run.group(questions[first : first + engine.batch]):
            result.pairs.append(pair)
            if progress:
                progress(len(result.pairs), result.speedup)
    return replace(result, skipped_turns=run.skipped)


class _Runner:
    """What stays the same from one group of questions to the next."""

    def __init__(
        self,
        engine: Engine,
        tree: TreeShape,
        rule: str,
        repeat: int,
        raw: bool,
        options: dict[str, Any],
    ) -> None:
        self.engine = engine
        self.shapes = (TreeShape.plain(), tree)
        self.rule = rule
        self.repeat = repeat
        self.raw = raw
        self.options = options
        self.count = 0
        self.skipped = 0

    def warm_up(self, question: Question) -> None:
        """Loads weights, binds shapes and wakes the cores: nothing that a measurement should pay for."""
        request = self._request([], question.turns[0])
        short = replace(request, max_new_tokens=min(16, request.max_new_tokens))
        for shape in self.shapes:
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
            order = (0, 1) if self.count % 2 == 0 else (1, 0)
            self.count += 1
            for which in order:
                runs[which].append(self.engine.decode(requests, self.shapes[which], rule=self.rule))
        plain, speculative = runs
        for same in runs:
            if any(_tokens(again) != _tokens(same[0]) for again in same[1:]):
                raise EagleError(f"question {questions[0].id}: the same run gave other tokens the second time")
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
            mismatch = find_mismatch(decoder.session, request, expected, found, chunk=decoder.chunk)
            if mismatch:
                yield place, mismatch


def merge(runs: Sequence[Stats]) -> Stats:
    """The counts and seconds of several runs as if they were one."""
    total = Stats()
    for stats in runs:
        for name, value in stats.__dict__.items():
            if name != "reached":
                setattr(total, name, getattr(total, name) + value)
        total.reached += [0] * (len(stats.reached) - len(total.reached))
        for depth, count in enumerate(stats.reached):
            total.reached[depth] += count
    return total
