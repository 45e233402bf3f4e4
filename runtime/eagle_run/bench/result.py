"""What a benchmark measured, and the JSON that it ends in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eagle_run.bench.mismatch import Mismatch
from eagle_run.datasets import Question
from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
from eagle_run.errors import EagleError
from eagle_run.metrics import Metrics, RoundTime, total_metrics
from eagle_run.params import SamplingParams

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class BenchRun:
    """The counts of one run, and the time of each of its rounds."""

    metrics: Metrics
    round_times: tuple[RoundTime, ...]


@dataclass(frozen=True)
class Pair:
    """The same requests decoded both ways: `batch` questions at one turn, all repeats of them.

    Of repeats the first gives the counts (the tokens of all are the same, which is checked) and the median
    gives the seconds. `mismatches` are (place in the group, where the answers part); `answers` are the texts
    of plain decoding, which later turns follow.
    """

    questions: tuple[Question, ...]
    turn: int
    plain: tuple[BenchRun, ...]
    speculative: tuple[BenchRun, ...]
    mismatches: tuple[tuple[int, Mismatch], ...]
    answers: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return _rate([self.speculative]) / _rate([self.plain])

    def as_dict(self) -> dict[str, Any]:
        metrics = self.speculative[0].metrics
        return {
            "ids": [question.id for question in self.questions],
            "category": self.questions[0].category,
            "turn": self.turn,
            "prompt_tokens": metrics.prompt_tokens,
            "tokens": metrics.tokens,
            "plain_tokens_per_second": round(_rate([self.plain]), 3),
            "tokens_per_second": round(_rate([self.speculative]), 3),
            "speedup": round(self.speedup, 4),
            "tokens_per_round": round(metrics.tokens_per_round, 4),
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
    speculative: SpeculativeConfig
    params: SamplingParams
    pairs: list[Pair] = field(default_factory=list)
    skipped_turns: int = 0
    captures: dict[str, Any] | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Speculative tokens per second over all questions, over plain decoding's."""
        plain, speculative = self._runs()
        return _rate(speculative) / _rate(plain)

    @property
    def identical_outputs(self) -> float | None:
        """Share of answers that equal plain decoding's. None where they need not: sampled drafts at T > 0."""
        if self.speculative.acceptance is AcceptanceRule.SAMPLED and self.params.temperature > 0:
            return None
        answers = sum(len(pair.questions) for pair in self.pairs)
        return 1 - sum(len(pair.mismatches) for pair in self.pairs) / answers

    def report(self, *, per_prompt: bool = False) -> dict[str, Any]:
        """What `eagle-run bench` prints; `per_prompt` adds an entry for every pair.

        Milliseconds are medians over all rounds.
        """
        plain, speculative = self._runs()
        metrics = total_metrics(run[0].metrics for run in speculative)
        ratios = [pair.speedup for pair in self.pairs]
        report: dict[str, Any] = {
            "bundle": self.bundle,
            "backend": self.backend,
            "device": self.device,
            "precision": self.precision,
            "batch": self.batch,
            "tree": self.speculative.tree.as_dict(),
            "draft": str(self.speculative.acceptance),
            "sampling": {name: getattr(self.params, name) for name in _SAMPLING},
            "max_new_tokens": self.params.max_tokens,
            "prompts": len({question.id for pair in self.pairs for question in pair.questions}),
            "plain": _figures(plain),
            "speculative": {
                **_figures(speculative),
                "tokens_per_round": round(metrics.tokens_per_round, 4),
                "acceptance_by_depth": [round(share, 4) for share in metrics.acceptance_by_depth],
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
            "cuda_graphs": self.captures,
            "environment": self.environment,
        }
        if per_prompt:
            report["per_prompt"] = [pair.as_dict() for pair in self.pairs]
        return report

    def _runs(self) -> tuple[list[tuple[BenchRun, ...]], list[tuple[BenchRun, ...]]]:
        if not self.pairs:
            raise EagleError("nothing was measured: no question fits the context of this bundle")
        return [pair.plain for pair in self.pairs], [pair.speculative for pair in self.pairs]


def _seconds(repeats: Sequence[BenchRun]) -> float:
    return median(run.metrics.decode_seconds for run in repeats)


def _rate(runs: Sequence[Sequence[BenchRun]]) -> float:
    """Tokens per second of decoding over several runs, each given as its repeats."""
    return sum(repeats[0].metrics.tokens for repeats in runs) / sum(_seconds(repeats) for repeats in runs)


def _figures(runs: Sequence[Sequence[BenchRun]]) -> dict[str, Any]:
    """Totals, and the median round by phase; `glue_share` is of all decoding time.

    Without phases where graphs are not timed one by one (see `ModelRunner.timed`).
    """
    everything = [run for repeats in runs for run in repeats]
    rounds = [time for run in everything for time in run.round_times]
    total = total_metrics(run.metrics for run in everything)
    phases: dict[str, float] = {"round_ms": 1e3 * median(time.total for time in rounds)}
    if total.verify_seconds:
        glue = total.decode_seconds - total.draft_seconds - total.verify_seconds
        phases = {
            "draft_ms": 1e3 * median(time.draft for time in rounds),
            "verify_ms": 1e3 * median(time.verify for time in rounds),
            "glue_ms": 1e3 * median(time.glue for time in rounds),
            "glue_share": glue / total.decode_seconds,
        }
    return {
        "tokens_per_second": round(_rate(runs), 3),
        "tokens": sum(repeats[0].metrics.tokens for repeats in runs),
        "seconds": round(sum(map(_seconds, runs)), 3),
        "rounds": sum(repeats[0].metrics.rounds for repeats in runs),
        **{name: round(value, 4) for name, value in phases.items()},
        "prefill_ms": round(1e3 * median(run.metrics.prefill_seconds for run in everything), 3),
    }
