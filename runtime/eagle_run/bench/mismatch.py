"""Why two answers that should be equal are not: a tie that rounding decided, or a fault.

A forward over N rows sums in another order than a forward over one, and so does a node of a tree whose rows
are not side by side: float32 logits move by about 1e-5 of their size. Where two tokens are that close the
choice is open; such ties are reported, never hidden.

Narrower types round such a last bit to another number, and FP8 to one that is 6% off, which grows from layer
to layer. Ties are as wide as that was seen to move logits, with room; a wrong mask or cache moves them by
whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from eagle_run.backends.stream import on_stream
from eagle_run.decoding.rng import TOKEN, uniform
from eagle_run.decoding.sampling import distribution, stack, to_weights
from eagle_run.engine.engine import Engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.offline import OfflineRequest
from eagle_run.engine.prefill import fill, kv_bucket, prefill
from eagle_run.params import SamplingParams

# By precision, of logits at temperature 0 and of probability above it. Seen so far: 0.03 and 0.003 in fp16;
# in fp8 0.2 and 0.07, against a single row.
TIES = {"fp32": (1e-4, 1e-4), "fp16": (0.05, 0.02), "bf16": (0.5, 0.1), "fp8": (1.0, 0.1)}
TIE = TIES["fp32"][0]


@dataclass(frozen=True)
class Mismatch:
    """The first place where an answer differs from plain decoding.

    `position` counts the answer's tokens from 0; a token is None where that answer had ended. `gap` is how
    far the plain logits of this position are from giving both tokens: at temperature 0 the logit that the
    lower one lacks to the top, at T > 0 the probability by which the coin misses its interval; None where an
    answer ended. `tie`: the gap is within TIES of the runner's precision.
    """

    position: int
    plain: int | None
    speculative: int | None
    gap: float | None
    tie: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def find_mismatch(
    engine: Engine, request: OfflineRequest, plain: Sequence[int], speculative: Sequence[int]
) -> Mismatch | None:
    """Compares two answers to `request`; where they differ, plain decoding's logits are computed again.

    The engine must be idle: its caches are used.
    """
    runner, chunk = engine.runner, engine.limits.prefill_chunk
    pairs = enumerate(zip_longest(plain, speculative))
    difference = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), None)
    if difference is None:
        return None
    position, (a, b) = difference
    if a is None or b is None:
        return Mismatch(position, a, b, None, tie=False)
    prefix = (*request.prompt_token_ids, *plain[:position])
    with on_stream(runner.device):
        gap = _gap(next_logits(runner, prefix, chunk=chunk), (a, b), request.params, len(prefix))
    widest = TIES[runner.precision][request.params.temperature > 0]
    return Mismatch(position, a, b, gap, tie=gap <= widest)


def next_logits(runner: ModelRunner, tokens: Sequence[int], *, chunk: int) -> Tensor:
    """f32 [V]: the target's logits after `tokens`, by a prefill and a forward over the last token alone."""
    state = runner.new_state(1, stack([SamplingParams(temperature=0)] * runner.batch, runner.device))
    prefill(runner, state, 0, tokens, chunk=chunk)
    kv = kv_bucket(len(tokens), runner.cache_rows)
    target = runner.target(1, 1, kv)
    positions = state.length[:, None]  # [B, 1]
    fill(
        target.inputs,
        input_ids=state.root[:, None],
        position_ids=positions,
        write_index=state.length,
        logits_index=torch.zeros_like(positions),
        tree_mask=(torch.arange(kv, device=runner.device) <= positions[:, :, None])[:, None],
    )
    target.run()
    return target.outputs["logits"][0, 0].float().clone()


def _gap(logits: Tensor, tokens: tuple[int, int], params: SamplingParams, position: int) -> float:
    """How much the choice at `position` (absolute) would have to move to give the less likely of `tokens`."""
    if params.temperature == 0:
        return float(logits.max() - logits[list(tokens)].min())
    settings = stack([params], logits.device)
    weights = to_weights(distribution(logits[None], settings))[0]  # i64 [V]
    cdf = weights.cumsum(0).double() / weights.sum()  # as in sampling.draw
    coin = uniform(settings.seed, position, TOKEN)[0]
    low, high = (cdf - weights.double() / weights.sum())[list(tokens)], cdf[list(tokens)]
    return float(torch.maximum(low - coin, coin - high).clamp(min=0).max())
