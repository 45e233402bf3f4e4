"""Distributions against a slow sort in float64 and against Transformers' warpers; draws; children."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from eagle_run.decoding.rng import CHILD, uniform
from eagle_run.decoding.sampling import (
    SamplingParams,
    SamplingTensors,
    _threshold,
    argmax,
    distribution,
    draft_distribution,
    draw,
    sample_children,
    sample_without_replacement,
    sampling_flags,
    stack,
    to_weights,
)
from eagle_run.errors import UsageError

_ALMOST_ONE = 1 - 2.0**-53

_settings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.011]),
    min_p=st.sampled_from([0.0, 0.07, 1.0]),
)


def slow_distribution(logits: list[float], s: SamplingParams) -> list[float]:
    """Sorts, cuts and renormalises in float64; keeps what ties with the last token kept."""
    n = len(logits)
    if s.temperature == 0:
        best = max(range(n), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(n)]
    top = max(logits)
    p = [math.exp((x - top) / s.temperature) for x in logits]
    p = [x / sum(p) for x in p]
    ranked = sorted(p, reverse=True)
    cut = 0.0
    if s.top_k:
        cut = ranked[min(s.top_k, n) - 1]
        ranked = [x for x in ranked if x >= cut]
    if s.top_p < 1:
        mass = 0.0
        for x in ranked:
            cut, mass = x, mass + x
            if mass >= s.top_p * sum(ranked):
                break
    cut = max(cut, s.min_p * max(p))
    kept = [x if x >= cut else 0.0 for x in p]
    return [x / sum(kept) for x in kept]


# Logits from a coarse set: ties are the rule, also at thresholds, but masses stay clear of top_p itself.
_row = st.lists(st.sampled_from([-math.inf, -4.0, -1.37, 0.0, 0.61, 2.2]), min_size=8, max_size=8)


@given(rows=st.lists(st.tuples(_row, _settings), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_distribution_equals_a_sort(rows: list[tuple[list[float], SamplingParams]]) -> None:
    rows = [([*row[:-1], 0.5], s) for row, s in rows]  # not every logit may be -inf
    logits = torch.tensor([row for row, _ in rows])
    p = distribution(logits, stack([s for _, s in rows]))
    expected = torch.tensor([slow_distribution(row, s) for row, s in rows], dtype=torch.float64)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.double(), expected, atol=2e-7, rtol=2e-6)
    assert ((p > 0) == (expected > 1e-30)).all()


@pytest.mark.parametrize("vocab", [300, 3000, 6000])
@pytest.mark.parametrize(
    "s",
    [
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.02),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.8, min_p=0.03),
    ],
)
def test_distribution_equals_transformers(s: SamplingParams, vocab: int) -> None:
    from transformers.generation import logits_process as hf

    torch.manual_seed(1)
    logits = torch.randn(16, vocab) * 3
    scores, ids = logits, torch.zeros(16, 1, dtype=torch.int64)
    warpers = [hf.TemperatureLogitsWarper(s.temperature)]
    warpers += [hf.TopKLogitsWarper(s.top_k)] if s.top_k else []
    warpers += [hf.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(s.min_p)] if s.min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    p = distribution(logits, stack([s] * 16))
    torch.testing.assert_close(p, scores.softmax(-1), atol=1e-6, rtol=1e-5)
    assert 1 < (p > 0).sum() < p.numel() / 2


def test_a_slot_does_not_depend_on_the_others() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 3, 1024) * 2
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=7, min_p=0.1),
        SamplingParams(temperature=1.1, top_p=0.7),
    ]
    together = distribution(logits, stack(mixed))
    for slot, s in enumerate(mixed):
        alone = distribution(logits[slot : slot + 1], stack([s]))
        assert torch.equal(together[slot : slot + 1], alone)
        for node in range(3):  # and one row of a tree is what it is alone
            assert torch.equal(alone[:, node], distribution(logits[slot : slot + 1, node], stack([s])))


@pytest.mark.parametrize("vocab", [1, 7, 64, 1000, 1536, 32000])
def test_argmax_takes_the_lowest_of_equals(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randint(0, 4, (3, 2, vocab)).float()
    expected = [[row.index(max(row)) for row in slot] for slot in logits.tolist()]
    assert argmax(logits).tolist() == expected
    assert distribution(logits, stack([SamplingParams(temperature=0)] * 3)).argmax(-1).tolist() == expected
    assert distribution(logits, stack([SamplingParams(temperature=0)] * 3)).sum(-1).eq(1).all()


def test_temperature_near_zero_is_greedy_and_finite() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4, -math.inf]])
    assert distribution(logits, stack([SamplingParams(temperature=1e-6)])).tolist() == [[1, 0, 0, 0]]
    assert distribution(logits, stack([SamplingParams(temperature=1e6)])).isfinite().all()


@given(
    values=st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 9)), min_size=1, max_size=40),
    share=st.floats(0.0, 1.0),
    more=st.sampled_from([0, 600, 5000]),  # tokens without weight: digits of 6, 10 and 15 bits
)
@settings(max_examples=150, deadline=None)
def test_threshold_equals_a_search(values: list[tuple[float, int]], share: float, more: int) -> None:
    p, weights = [v for v, _ in values] + [0.0] * more, [w for _, w in values] + [0] * more
    if sum(weights) == 0:
        weights[0] = 1
    target = max(1, int(share * sum(weights)))
    bits = torch.tensor([p]).view(torch.int32)
    found = _threshold(bits, torch.tensor([weights]), torch.tensor([[target]]))

    def at_least(t: int) -> int:
        return sum(w for b, w in zip(bits[0].tolist(), weights, strict=True) if b >= t)

    assert at_least(found.item()) >= target
    assert at_least(found.item() + 1) < target


@given(p=st.lists(st.integers(0, 3), min_size=1, max_size=9).filter(any), u=st.floats(0, _ALMOST_ONE))
@settings(max_examples=150, deadline=None)
def test_draw_equals_a_running_sum(p: list[int], u: float) -> None:
    total, token, run = sum(p), 0, p[0]
    while run <= u * total:
        token += 1
        run += p[token]
    # Multiples of 1/32 are whole weights, so that the running sums are exact on both sides.
    found = draw(torch.tensor([p]) / 32, torch.tensor([u], dtype=torch.float64)).item()
    assert found == token


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, _ALMOST_ONE])
def test_draw_never_takes_a_token_of_probability_zero(u: float) -> None:
    for p in ([0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.5], [0.0, 0.1, 0.2, 0.7], [0.3, 0.3, 0.3, 0.0]):
        token = draw(torch.tensor(p), torch.tensor(u, dtype=torch.float64)).item()
        assert p[int(token)] > 0
    torch.manual_seed(3)
    p = torch.randn(64, 5000).mul(9).softmax(-1) * (torch.rand(64, 5000) < 0.5)
    tokens = draw(p / p.sum(-1, keepdim=True), torch.full((64,), u, dtype=torch.float64))
    assert (p.gather(1, tokens[:, None]) > 0).all()


def test_draw_follows_p() -> None:
    p = torch.tensor([0.05, 0.0, 0.4, 0.25, 0.3])
    coins = uniform(torch.arange(50_000), 3)
    counts = torch.bincount(draw(p.expand(50_000, -1), coins), minlength=5).double()
    kept = p > 0
    expected = p[kept].double() * 50_000
    assert counts[1] == 0
    assert chi2.sf(((counts[kept] - expected) ** 2 / expected).sum().item(), 3) > 1e-3


def test_without_replacement_draws_every_order_with_its_probability() -> None:
    q = [0.5, 0.0, 0.25, 0.125, 0.125]
    n, k = 40_000, 3
    coins = uniform(torch.arange(n)[:, None, None], 5, CHILD, torch.arange(k))  # [n, 1, k]
    tokens = sample_without_replacement(torch.tensor(q).expand(n, 1, -1), coins)[:, 0]  # [n, k]
    statistic, orders = 0.0, list(permutations([0, 2, 3, 4], k))
    for order in orders:
        expected, left = float(n), 1.0
        for token in order:
            expected *= q[token] / left
            left -= q[token]
        found = (tokens == torch.tensor(order)).all(-1).sum().item()
        statistic += (found - expected) ** 2 / expected
    assert chi2.sf(statistic, len(orders) - 1) > 1e-3  # also says that no other order occurs


@pytest.mark.parametrize("u", [0.0, 0.4, _ALMOST_ONE])
def test_without_replacement_marks_missing_children(u: float) -> None:
    q = torch.tensor([[[0.0, 0.75, 0.0, 0.25], [0.0, 0.0, 1.0, 0.0]]])
    tokens = sample_without_replacement(q, torch.full((1, 2, 3), u, dtype=torch.float64))
    assert sorted(tokens[0, 0].tolist()) == [-1, 1, 3]
    assert tokens[0, 0, 2] == -1
    assert tokens[0, 1].tolist() == [2, -1, -1]


def test_children_of_a_greedy_slot_are_the_best_ones() -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, 3, 128)
    both = stack([SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=5)])
    tokens, q = sample_children(logits, 4, both, torch.tensor([10, 20]))
    assert torch.equal(tokens[0].view(3, 4), logits[0].topk(4).indices)
    assert torch.equal(q, draft_distribution(logits, both))
    torch.testing.assert_close(q[1], (logits[1] / 0.8).softmax(-1))
    alone, _ = sample_children(
        logits[1:], 4, stack([SamplingParams(temperature=0.8, seed=5)]), torch.tensor([20])
    )
    assert torch.equal(tokens[1:], alone)
    coins = uniform(torch.tensor(5), 20, CHILD, torch.arange(12)).view(1, 3, 4)
    assert torch.equal(alone.view(1, 3, 4), sample_without_replacement(q[1:], coins))


def test_draft_probabilities_lie_on_the_grid() -> None:
    torch.manual_seed(5)
    logits = torch.randn(1, 2, 999) * 20
    q = draft_distribution(logits, stack([SamplingParams(temperature=0.4)]))
    assert torch.equal(to_weights(q).double() / 2.0**52, q.double())


def test_switches_name_the_code_that_is_needed() -> None:
    greedy = sampling_flags([SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)] * 2)
    assert (greedy.all_greedy, greedy.top_k, greedy.top_p, greedy.min_p) == (True, False, False, False)
    mixed = sampling_flags([SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_p=0.5)])
    assert (mixed.all_greedy, mixed.any_greedy, mixed.top_k, mixed.top_p) == (False, True, False, True)
    assert hash(mixed) == hash(
        sampling_flags([SamplingParams(temperature=0.4, top_p=0.2), SamplingParams(temperature=0)])
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-30),
        ("top_k", -2),
        ("n", 0),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("top_k", 2.5),
        ("top_k", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_settings_out_of_range_are_usage_errors(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_nothing_reads_the_host() -> None:
    """Under FakeTensorMode a host read or a shape that depends on data raises.

    On the device "cpu": a build without CUDA can not index fake CUDA tensors.
    """
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, seed=3),
    ]
    with FakeTensorMode():
        s: SamplingTensors = stack(mixed)
        logits = torch.randn(2, 3, 1024)
        p: Tensor = distribution(logits, s)
        coins = uniform(s.seed[:, None], torch.arange(3))
        assert draw(p, coins).shape == (2, 3)
        tokens, q = sample_children(logits, 4, s, torch.zeros(2, dtype=torch.int64))
        assert tokens.shape == (2, 12)
        assert q.shape == logits.shape
        assert argmax(logits).shape == (2, 3)
        with pytest.raises(DataDependentOutputException):  # the mode does catch it
            argmax(logits).sum().item()
