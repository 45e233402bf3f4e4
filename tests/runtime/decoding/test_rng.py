"""Coins: known answers against whole-number arithmetic, uniformity, independence of streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest, norm

from eagle_run.decoding.rng import ACCEPT, CHILD, TOKEN, uniform

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_I64 = st.integers(-(2**63), 2**63 - 1)


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _slow_uniform(seed: int, *counters: int) -> float:
    """The same mixing with Python's own integers: counter c is c more golden steps before the next mix."""
    state = _splitmix64(seed & _MASK)
    for counter in counters:
        state = _splitmix64((state + _GOLDEN * counter) & _MASK)
    return (state >> 11) / 2**53


def test_mixer_is_splitmix64() -> None:
    # The first outputs of the reference generator with seed 1234567.
    assert _splitmix64(1234567) == 6457827717110365317
    assert _splitmix64((1234567 + _GOLDEN) & _MASK) == 3203168211198807973


@given(seed=_I64, counters=st.lists(_I64, max_size=4))
@settings(max_examples=200, deadline=None)
def test_known_answers(seed: int, counters: list[int]) -> None:
    expected = _slow_uniform(seed, *counters)
    found = uniform(torch.tensor([seed]), *(torch.tensor([c]) for c in counters))
    assert found.dtype == torch.float64
    assert found.item() == expected
    assert uniform(torch.tensor([seed]), *counters).item() == expected  # plain ints count as tensors


def test_broadcasts_like_a_loop() -> None:
    seeds, positions = torch.arange(3)[:, None], torch.arange(100, 105)
    coins = uniform(seeds, positions, ACCEPT)
    assert coins.shape == (3, 5)
    for i in range(3):
        for j in range(5):
            assert coins[i, j].item() == _slow_uniform(i, 100 + j, ACCEPT)


@pytest.mark.parametrize("axis", ["seed", "position", "index"])
def test_uniform_along_every_counter(axis: str) -> None:
    n, bins = 100_000, 256
    line, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    arguments = {"seed": zero, "position": zero, "index": zero} | {axis: line}
    coins = uniform(arguments["seed"], arguments["position"], CHILD, arguments["index"])
    assert coins.min().item() >= 0
    assert coins.max().item() < 1
    counts = torch.histc(coins, bins, 0, 1)
    statistic = ((counts - n / bins) ** 2 / (n / bins)).sum().item()
    assert chi2.sf(statistic, bins - 1) > 1e-4
    assert kstest(coins.numpy(), "uniform").pvalue > 1e-4


def test_streams_positions_and_seeds_are_independent() -> None:
    n = 100_000
    seeds, at = torch.arange(n), torch.full((n,), 7)
    lines = [uniform(seeds, at, s) for s in (TOKEN, CHILD, ACCEPT)]
    lines += [uniform(seeds, at + 1, TOKEN), uniform(seeds + 1, at, TOKEN), uniform(seeds, at, ACCEPT, 1)]
    correlation = torch.corrcoef(torch.stack(lines))
    off = correlation - torch.eye(len(lines))
    assert off.abs().max().item() < norm.isf(1e-6) / n**0.5
    # Pairs fill the unit square evenly: correlation alone would miss a lattice.
    cells = (lines[0] * 16).long() * 16 + (lines[2] * 16).long()
    counts = torch.bincount(cells, minlength=256).double()
    assert chi2.sf(((counts - n / 256) ** 2 / (n / 256)).sum().item(), 255) > 1e-4
