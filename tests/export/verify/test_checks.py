"""Where `verify` draws its lines."""

from __future__ import annotations

from typing import Any

import pytest
from support.bundlemaker import ACCURACY

from eagle_export.verify.checks import BOUNDS, READING, Check, advice, check_acceptance, check_accuracy
from eagle_run.bundle.records import AccuracyInfo

GOOD = {**ACCURACY, "tokens": 2000, "top1_agreement": 0.999, "kl": 1e-6, "tokens_per_round": 1.75}


def statuses(precision: str, **changes: Any) -> dict[str, str]:
    checks = check_accuracy(AccuracyInfo(**{**GOOD, **changes}), precision)
    return {check.name.removeprefix("accuracy: "): check.status for check in checks}


@pytest.mark.parametrize("precision", sorted(BOUNDS))
def test_a_faithful_bundle_passes(precision: str) -> None:
    assert set(statuses(precision).values()) == {"ok"}
    assert list(statuses(precision)) == ["top-1", "KL", "draft"]


@pytest.mark.parametrize(
    ("precision", "top1", "status"),
    [
        ("fp16", 0.987, "ok"),  # two standard errors of 2000 tokens below 0.99
        ("fp16", 0.98, "fail"),
        ("bf16", 0.96, "warn"),
        ("bf16", 0.94, "fail"),
        ("fp8", 0.90, "ok"),
        ("fp8", 0.88, "warn"),
        ("fp8", 0.82, "fail"),
    ],
)
def test_top1_has_a_limit_by_precision(precision: str, top1: float, status: str) -> None:
    assert statuses(precision, top1_agreement=top1)["top-1"] == status


def test_few_tokens_leave_room_for_chance() -> None:
    assert statuses("fp16", top1_agreement=0.975, tokens=2000)["top-1"] == "fail"
    assert statuses("fp16", top1_agreement=0.975, tokens=100)["top-1"] == "ok"
    assert statuses("fp16", top1_agreement=0.5, tokens=100)["top-1"] == "fail"


@pytest.mark.parametrize(("precision", "kl"), [("fp16", 2e-3), ("bf16", 0.02), ("fp8", 0.2)])
def test_kl_has_a_limit_by_precision(precision: str, kl: float) -> None:
    assert statuses(precision, kl=kl)["KL"] == "fail"
    assert statuses(precision, kl=kl / 3)["KL"] == "ok"


@pytest.mark.parametrize(("share", "status"), [(1.1, "ok"), (0.96, "ok"), (0.9, "warn"), (0.8, "fail")])
def test_the_draft_may_not_lose_too_much(share: float, status: str) -> None:
    rounds = {"tokens_per_round": 2.0 * share, "reference_tokens_per_round": 2.0}
    assert statuses("fp8", **rounds)["draft"] == status


def test_without_a_head_the_draft_is_not_asked_for() -> None:
    none = {"tokens_per_round": None, "reference_tokens_per_round": None}
    assert list(statuses("bf16", **none)) == ["top-1", "KL"]


def test_what_stood_in_for_the_graphs_is_told() -> None:
    (check, *_) = check_accuracy(AccuracyInfo(**{**GOOD, "backend": "eager"}), "bf16")
    assert check.detail.endswith("by the modules it was exported from")
    assert "2000 tokens of 24 prompts" in check.detail


def test_a_head_at_chance_is_a_warning() -> None:
    profile = {"tokens_per_round": 1.05, "acceptance_by_depth": [0.05, 0.0], "chance": 0.11}
    check = check_acceptance(profile)
    assert check.status == "warn"
    assert "another target" in check.detail
    assert check_acceptance({**profile, "acceptance_by_depth": [0.4]}).status == "ok"
    assert check_acceptance({**profile, "acceptance_by_depth": []}).status == "warn"


def test_a_head_that_is_read_wrongly_makes_no_answer_wrong() -> None:
    fine, read = Check("target: logits", "ok", ""), Check(READING, "fail", "")
    assert "answers are right" in advice([fine, read])
    for wrong in ([Check("target: logits", "fail", ""), read], [Check("target: rows", "fail", "")]):
        assert "do not use this bundle" in advice([fine, *wrong])
