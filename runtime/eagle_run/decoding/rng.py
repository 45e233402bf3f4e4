"""Coins: uniform numbers that are pure functions of (seed, counters), with no generator state.

A coin belongs to the absolute position of the token that it decides. So a token does not depend on how the
tokens around it were batched, drafted or grouped into rounds, and decoding with a tree can be compared with
plain decoding token by token at any temperature. Nothing here reads the host: it runs inside a CUDA graph.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014), applied once per counter in wrapping 64-bit arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a coin is for. Coins of different streams are independent, so a drafted child never sees the coin that
# will accept it: the condition on which losslessness rests.
TOKEN = 0  # draws a token from the target's distribution
CHILD = 1  # draws a child from the draft's distribution; index = row of the level * children + rank
ACCEPT = 2  # accepts or rejects a drawn child; index = its place among its siblings


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = _signed(0xBF58476D1CE4E5B9)
_MUL2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's >> copies the sign bit in, the mask takes it out."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MUL1
    z = (z ^ _shift_right(z, 27)) * _MUL2
    return z ^ _shift_right(z, 31)


def uniform(seed: Tensor, *counters: Tensor | int) -> Tensor:
    """One coin in [0, 1) for each element of the broadcast of `seed` and `counters`.

    seed, counters: i64 (any sign), broadcastable; an int counts as a tensor full of it. The order of the
    counters matters and each adds one mixing step. Returns float64, a multiple of 2^-53, so never 1.
    """
    state = _mix(seed + _signed(_GOLDEN))
    for counter in counters:
        if isinstance(counter, int):
            state = _mix(state + _signed(_GOLDEN * (counter + 1)))
        else:
            state = _mix(state + (counter + 1) * _signed(_GOLDEN))
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53
