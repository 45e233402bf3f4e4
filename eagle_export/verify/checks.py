"""One question that `verify` puts to a bundle and its answer, and where the line is for accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from eagle_run.bundle.records import AccuracyInfo

Status = Literal["ok", "warn", "fail"]
READING = "head: reading"  # the one check that says nothing of the answers


@dataclass(frozen=True)
class Check:
    """One question and its answer. `value` is what was measured, `limit` the most (or least) it may be."""

    name: str
    status: Status
    detail: str
    value: float | None = None
    limit: float | None = None


def advice(checks: Iterable[Check]) -> str:
    """What to do about the checks that failed."""
    if {check.name for check in checks if check.status == "fail"} == {READING}:
        return "its answers are right, but more drafts could be accepted: build it again as the check says"
    return "do not use this bundle; build it again, and report it if that does not help"


@dataclass(frozen=True)
class Bounds:
    """What a precision may cost: `good` without a word, `least` (and `most`) before it is a fault."""

    good_top1: float
    least_top1: float
    most_kl: float


# Measured on SmolLM2-135M (docs/log.md): top-1 99.9, 99.0 and about 92%, KL 1e-5, 8e-4 and 0.04 nats; a model
# this small suffers most. A graph that computes something else is far beyond: its KL is counted in nats.
BOUNDS = {
    "fp16": Bounds(good_top1=0.99, least_top1=0.99, most_kl=1e-3),
    "bf16": Bounds(good_top1=0.98, least_top1=0.96, most_kl=1e-2),
    "fp8": Bounds(good_top1=0.91, least_top1=0.85, most_kl=0.15),
}
# Tokens per round, as a share of float32's. Answers differ, so this is noisy: 3% with a thousand tokens.
_GOOD_ROUNDS, _LEAST_ROUNDS = 0.95, 0.85


def check_accuracy(info: AccuracyInfo, precision: str) -> list[Check]:
    """Is what a precision costs within what it may cost? Two standard errors of top-1 are chance."""
    bounds = BOUNDS[precision]
    runner = {"onnxruntime": "", "eager": ", by the modules it was exported from"}[info.backend]
    tokens = f"over {info.tokens} tokens of {info.prompts} prompts and answers{runner}"
    checks = [
        Check(
            "accuracy: top-1",
            _status(
                info.top1_agreement, _allowing(bounds.good_top1, info), _allowing(bounds.least_top1, info)
            ),
            f"share of most likely tokens that are float32's, {tokens}",
            info.top1_agreement,
            _allowing(bounds.good_top1, info),
        ),
        Check(
            "accuracy: KL",
            "ok" if info.kl <= bounds.most_kl else "fail",
            f"nats from float32's distribution; perplexity {info.perplexity:.2f} "
            f"(float32: {info.reference_perplexity:.2f})",
            info.kl,
            bounds.most_kl,
        ),
    ]
    if info.tokens_per_round is not None and info.reference_tokens_per_round is not None:
        share = info.tokens_per_round / info.reference_tokens_per_round
        checks.append(
            Check(
                "accuracy: draft",
                _status(share, _GOOD_ROUNDS, _LEAST_ROUNDS),
                f"share of float32's tokens per round: {info.tokens_per_round:.2f} of "
                f"{info.reference_tokens_per_round:.2f}",
                share,
                _GOOD_ROUNDS,
            )
        )
    return checks


def check_acceptance(acceptance: dict[str, Any]) -> Check:
    """Warns when the head accepts no more than a head that knows nothing of the text would."""
    by_depth = acceptance["acceptance_by_depth"]
    first = by_depth[0] if by_depth else 0.0
    shares = " ".join(f"{share:.2f}" for share in by_depth) or "none"
    detail = f"{acceptance['tokens_per_round']:.2f} tokens per round; accepted by depth: {shares}"
    if first > acceptance["chance"]:
        return Check("acceptance", "ok", detail, first, acceptance["chance"])
    detail += (
        "; no more than chance: the head may be of another target (or of another fine-tune of it), its layer "
        "ids or rope base may be wrong, or it is untrained"
    )
    return Check("acceptance", "warn", detail, first, acceptance["chance"])


def _allowing(limit: float, info: AccuracyInfo) -> float:
    """`limit`, less two standard errors of a share that is measured on this many tokens."""
    return limit - 2 * math.sqrt(limit * (1 - limit) / info.tokens)


def _status(value: float, good: float, least: float) -> Status:
    return "ok" if value >= good else "warn" if value >= least else "fail"
