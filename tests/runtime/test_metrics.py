"""Counts and seconds: of a round, of several runs together, and of what came after a moment."""

from __future__ import annotations

import pytest

from eagle_run.metrics import Metrics, RoundTime, round_time, total_metrics


def test_total_adds_everything() -> None:
    a, b = Metrics(tokens=3, prefill_seconds=1.0), Metrics(tokens=4, prefill_seconds=0.5)
    a.add_path(3, drafted=4)
    a.add_path(1, drafted=4)
    b.add_path(2, drafted=1)
    total = total_metrics([a, b])
    assert (total.tokens, total.prefill_seconds, total.rounds, total.emitted) == (7, 1.5, 3, 6)
    assert (total.drafted, total.accepted) == (9, 3)
    assert total.reached == [3, 2, 1]
    assert total.acceptance_by_depth == pytest.approx([2 / 3, 1 / 2])


def test_since_is_what_came_later() -> None:
    metrics = Metrics(tokens=5)
    metrics.add_path(3, drafted=3)
    start = metrics.copy()
    metrics.add_path(2, drafted=3)
    metrics.add_time(RoundTime(0.1, 0.2, 0.3))
    metrics.tokens += 2
    later = metrics.since(start)
    assert (later.tokens, later.rounds, later.emitted, later.steps) == (2, 1, 2, 1)
    assert later.reached == [1, 1]
    assert later.decode_seconds == pytest.approx(0.6)
    assert start.reached == [1, 1, 1]  # a copy of its own


def test_a_rounds_time_is_divided_by_its_graphs() -> None:
    time = round_time(1.0, {"draft": 0.2, "fuse": 0.1, "target": 0.4})
    assert (time.draft, time.verify, time.glue) == pytest.approx((0.3, 0.4, 0.3))
    assert time.total == pytest.approx(1.0)
    metrics = Metrics()
    metrics.add_time(time)
    assert metrics.phases() == pytest.approx({"draft_ms": 300, "verify_ms": 400, "glue_ms": 300})
    untimed = Metrics()
    untimed.add_time(round_time(0.5, {}))
    assert untimed.phases() == pytest.approx({"round_ms": 500})
