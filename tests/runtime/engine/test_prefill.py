"""Sizes that forwards are rounded up to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_run.engine.prefill import kv_bucket, round_up


@given(rows=st.integers(1, 100_000))
def test_a_bucket_holds_the_rows_and_is_at_most_a_quarter_too_wide(rows: int) -> None:
    width = kv_bucket(rows, 10**9)
    assert width >= rows
    assert width <= max(128, rows * 1.25)
    assert kv_bucket(width, 10**9) == width  # a bucket is its own bucket


def test_buckets_are_few() -> None:
    assert len({kv_bucket(rows, 8192) for rows in range(1, 8193)}) <= 26


def test_a_bucket_never_passes_the_cache() -> None:
    assert kv_bucket(2100, 2240) == 2240
    assert kv_bucket(100, 96) == 96


def test_round_up() -> None:
    assert [round_up(size, (1, 8, 16), most=12) for size in (1, 2, 8, 9, 12)] == [1, 8, 8, 12, 12]
