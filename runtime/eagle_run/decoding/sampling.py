"""Logits -> probabilities -> seeded draws, per slot, without reading the host.

Probabilities are float32. Every sum that decides something (a CDF, a nucleus, what is left after a draw) is
taken over *weights*: the probabilities as whole multiples of 2^-52 in int64. Sums of integers do not depend
on their order, so a draw does not change with the batch, the number of threads or the device, and a token
of weight zero can not be drawn, by construction. What is lost (below 2^-52 a token) is far under float32's
own error.

Parameters of the requests are tensors [B], so new settings need no new capture; only `SamplingFlags`, known
to the host, selects which code runs. B batch, V vocabulary, Vd draft vocabulary, k children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_run.decoding.rng import CHILD, uniform
from eagle_run.params import SamplingParams

_GRID = 2.0**52


@dataclass(frozen=True)
class SamplingFlags:
    """Which code a batch needs: the part of its settings that the host knows. Hashable: a key for captures.

    all_greedy: every slot has temperature 0. any_greedy: some slot has. top_k, top_p, min_p: some slot
    filters. A slot's result does not change when another slot raises a flag.
    """

    all_greedy: bool
    any_greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool

    def joined(self, other: SamplingFlags) -> SamplingFlags:
        """The code that the requests of both need together."""
        return SamplingFlags(
            all_greedy=self.all_greedy and other.all_greedy,
            any_greedy=self.any_greedy or other.any_greedy,
            top_k=self.top_k or other.top_k,
            top_p=self.top_p or other.top_p,
            min_p=self.min_p or other.min_p,
        )


@dataclass(frozen=True)
class SamplingTensors:
    """The settings of B slots. temperature f32[B], top_k i64[B], top_p f64[B], min_p f32[B], seed i64[B]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    flags: SamplingFlags

    def put(self, slot: int, params: SamplingParams) -> None:
        """Gives a slot the parameters of another request, in place. `flags` must know them already."""
        for name, value in _values(params).items():
            getattr(self, name)[slot] = value


def sampling_flags(settings: Sequence[SamplingParams]) -> SamplingFlags:
    """The code that these requests need together."""
    greedy = [s.temperature == 0 for s in settings]
    sampled = [s for s in settings if s.temperature > 0]  # a filter keeps the argmax: greedy slots need none
    return SamplingFlags(
        all_greedy=all(greedy),
        any_greedy=any(greedy),
        top_k=any(s.filter_k > 0 for s in sampled),
        top_p=any(s.top_p < 1 for s in sampled),
        min_p=any(s.min_p > 0 for s in sampled),
    )


def _values(params: SamplingParams) -> dict[str, float]:
    """The numbers of a slot. The seed should have been chosen by then; 0 stands for any."""
    return {
        "temperature": params.temperature,
        "top_k": params.filter_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": params.seed or 0,
    }


def stack(settings: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingTensors:
    """The settings of a batch as tensors [B] on `device` (a copy from the host: not inside a capture)."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([_values(s)[name] for s in settings], dtype=dtype, device=device)

    return SamplingTensors(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float64),
        min_p=column("min_p", torch.float32),
        seed=column("seed", torch.int64),
        flags=sampling_flags(settings),
    )


def _per_slot(value: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ..., 1], to broadcast over `like` [B, ..., V]."""
    return value.view(-1, *[1] * (like.dim() - 1))


def argmax(x: Tensor) -> Tensor:
    """The lowest index of the largest value: [..., V] -> i64[...].

    One operation: right after a forward, whose weights have emptied the caches, several small vectorised ones
    take longer on a CPU, though they win when repeated.
    """
    return x.argmax(-1)


def distribution(logits: Tensor, settings: SamplingTensors) -> Tensor:
    """The probabilities that a request samples from: logits [B, ..., V] -> f32 of the same shape.

    temperature, then top-k, then top-p over what top-k left, then min-p against the most probable token, then
    normalised: the order of Transformers' logits warpers. Tokens that tie with the last one kept are kept too
    (for top-p a sort would keep an arbitrary one of them). Temperature 0 gives 1 to the most probable token,
    the lowest id among equals. Logits may hold -inf.
    """
    flags = settings.flags
    temperature = _per_slot(settings.temperature, logits)
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)  # <= 0, so that a tiny temperature gives -inf, never nan
    p = torch.softmax(shifted / torch.where(temperature > 0, temperature, 1.0), -1)
    if flags.top_k or flags.top_p or flags.min_p:
        p = _filter(p, settings)
    if flags.any_greedy:
        ids = torch.arange(p.shape[-1], device=p.device)
        p = torch.where(temperature > 0, p, (ids == argmax(logits).unsqueeze(-1)).float())
    return p


def _filter(p: Tensor, settings: SamplingTensors) -> Tensor:
    """Zeroes what top-k, top-p and min-p cut off and normalises the slots that cut. p f32[B, ..., V].

    One threshold on the probability does all three: what top-p keeps of top-k's renormalised set is the
    smallest head of the sorted vocabulary that holds top_p times the set's mass, so it lies inside that set.
    """
    flags = settings.flags
    bits = p.view(torch.int32)  # in the order of the non-negative floats that they encode
    weights = to_weights(p)
    keep_from = torch.zeros_like(bits[..., :1])  # bits of the least probability kept; 0 keeps all
    if flags.top_k:
        top_k = _per_slot(settings.top_k, p).expand_as(keep_from)
        ones = torch.ones_like(weights[..., :1]).expand_as(weights)
        kth = _threshold(bits, ones, top_k.clamp(1, p.shape[-1]))
        keep_from = torch.where(top_k > 0, kth, keep_from)
    if flags.top_p:
        top_p = _per_slot(settings.top_p, p)
        mass = _mass(weights, bits >= keep_from)
        nucleus = _threshold(bits, weights, (mass * top_p).ceil().long().clamp(min=1).minimum(mass))
        keep_from = torch.where(top_p < 1, nucleus.maximum(keep_from), keep_from)
    if flags.min_p:
        least = _per_slot(settings.min_p, p) * p.amax(-1, keepdim=True)
        keep_from = keep_from.maximum(least.view(torch.int32))
    keep = bits >= keep_from
    # a slot that cuts nothing keeps its very bits, whatever the other slots do
    scale = torch.where(keep_from > 0, _mass(weights, keep).double() / _GRID, 1.0).float()
    return torch.where(keep, p / scale, 0.0)


def _mass(weights: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, weights, 0).sum(-1, keepdim=True)


def _threshold(bits: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The largest t with sum(weights where bits >= t) >= target.

    bits i32 and weights i64 [..., V], target i64 [..., 1], 1 <= target <= sum(weights) -> i32 [..., 1]. Radix
    selection over the 30 bits of a float32 up to 1.0: a histogram of the first digit finds the bin that holds
    the target, the next digit is looked up inside it. On a CPU several times faster than a sort or 31
    bisections, on a GPU a handful of kernels. A small vocabulary takes small digits: a histogram costs too.
    """
    digit = 15 if bits.shape[-1] >= 4096 else 10 if bits.shape[-1] >= 512 else 6
    allowed = weights.sum(-1, keepdim=True) - target  # most weight that may lie below t
    shift = 30 - digit
    prefix = _bin_of(bits >> shift, weights, allowed, bins=1 << digit) << shift
    spare = min(1 << digit, 4096)  # bins for what lies below the prefix: one alone would be a bottleneck
    while shift:
        shift -= digit
        place = (bits - (prefix - (spare << shift))) >> shift  # the digit, from bin `spare` on
        place = place.maximum(bits & (spare - 1)).clamp(max=spare + (1 << digit))  # the last: all above
        found = _bin_of(place, weights, allowed, bins=spare + (1 << digit) + 1)
        prefix = prefix + ((found - spare) << shift)
    return prefix


def _bin_of(place: Tensor, weights: Tensor, allowed: Tensor, *, bins: int) -> Tensor:
    """The last bin whose lower neighbours together weigh at most `allowed` i64 [..., 1]: i32 [..., 1]."""
    histogram = torch.zeros(*place.shape[:-1], bins, dtype=torch.int64, device=place.device)
    below = histogram.scatter_add(-1, place.long(), weights).cumsum(-1)
    return torch.searchsorted(below, allowed, right=True, out_int32=True)


def to_weights(p: Tensor) -> Tensor:
    """Probabilities as whole multiples of 2^-52, rounded down: f32 or f64 [..., V] -> i64 [..., V]."""
    return (p * _GRID).long()  # a power of two: the product is exact


def draw_weights(weights: Tensor, u: Tensor) -> Tensor:
    """A token by inverse CDF: i64 weights [..., V] and coins f64 [...] in [0, 1) -> i64 [...].

    The token's weight is positive for every coin, unless all weights are zero.
    """
    cdf = weights.cumsum(-1)
    total = cdf[..., -1:]
    goal = (u.unsqueeze(-1) * total).long()  # < total: 1 - 2^-53 times a float never rounds back up to it
    found = torch.searchsorted(cdf, goal.contiguous(), right=True)  # first token whose cdf exceeds the goal
    return found.squeeze(-1).clamp(max=weights.shape[-1] - 1)  # no weight at all, or nan, ends past the end


def draw(p: Tensor, u: Tensor) -> Tensor:
    """A token, never one with p = 0: probabilities [..., V] (sum about 1), coins f64 [...] -> i64 [...]."""
    return draw_weights(to_weights(p), u)


def draft_distribution(logits: Tensor, settings: SamplingTensors) -> Tensor:
    """The q that children are sampled from: draft logits [B, w, Vd] -> f32, softmax(logits / temperature).

    The request's temperature but not its filters: any q is lossless as long as the very same q is used to
    draw and to accept; filters would cost time and leave rows with fewer than k tokens. A greedy slot uses
    temperature 1: there q only ranks the children. Values are rounded down to multiples of 2^-52, which
    float32 holds exactly, so that the q of the acceptance is, bit for bit, the law of the draws.
    """
    temperature = _per_slot(settings.temperature, logits)
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)
    q = torch.softmax(shifted / torch.where(temperature > 0, temperature, 1.0), -1)
    return (q * _GRID).floor() / _GRID


def sample_without_replacement(q: Tensor, u: Tensor, greedy: Tensor | None = None) -> Tensor:
    """k distinct tokens a row: draw from q, set what was drawn to zero, draw again.

    q [B, w, Vd], u f64 [B, w, k] in [0, 1), greedy bool[B] (those slots take the most probable token each
    time, u unused) -> i64 [B, w, k] in drawn order. A row with fewer than k tokens of positive q ends in
    -1, which is no token: such a child does not exist and nothing can match it.
    """
    weights = to_weights(q)
    tokens = []
    for rank in range(u.shape[-1]):
        token = draw_weights(weights, u[..., rank])  # [B, w]
        if greedy is not None:
            token = torch.where(greedy[:, None], argmax(weights), token)
        exists = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1) > 0
        weights = weights.scatter(-1, token.unsqueeze(-1), 0)
        tokens.append(torch.where(exists, token, -1))
    return torch.stack(tokens, -1)


def sample_children(
    logits: Tensor, children: int, settings: SamplingTensors, position: Tensor
) -> tuple[Tensor, Tensor]:
    """The children of one level's rows for the sampled rule.

    logits [B, w, Vd] of the draft; position i64[B]: absolute position of the children (root's + level.depth).
    Returns (draft ids i64 [B, w * children] in sampled order, -1 where missing; q f32 [B, w, Vd]).
    """
    batch, width, _ = logits.shape
    q = draft_distribution(logits, settings)
    index = torch.arange(width * children, device=logits.device).view(1, width, children)
    coins = uniform(settings.seed.view(-1, 1, 1), position.view(-1, 1, 1), CHILD, index)  # [B, w, k]
    greedy = settings.temperature == 0 if settings.flags.any_greedy else None
    tokens = sample_without_replacement(q, coins, greedy)
    return tokens.view(batch, width * children), q
