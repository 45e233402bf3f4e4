"""What FP8 means, slowly and obviously: a table of all its numbers, and products of dequantised values.

Nothing here uses torch's or ONNX's own FP8 types, nor the package's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from eagle_run.decoding.tree import TreeShape

# What the tiny models are calibrated on, and the tree that they decode with.
PROMPTS = ((2, 17, 9, 40, 33, 3), (2, 8, 61, 3), (2, 70, 71, 5, 6, 22, 41, 13, 3))
TREE = TreeShape.dynamic(3, 2, 6)


def _decode(code: int) -> float:
    """The value of an E4M3 code without a sign: 4 bits of exponent (bias 7), 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = np.array([_decode(code) for code in range(127)])  # code 127 is NaN


def nearest(x: np.ndarray) -> np.ndarray:
    """Each value's nearest FP8 number, a tie going to the even code; beyond 448 the largest."""
    size = np.minimum(np.abs(x.astype(np.float64)), POSITIVE[-1])
    above = np.searchsorted(POSITIVE, size).clip(1, len(POSITIVE) - 1)
    low, high = POSITIVE[above - 1], POSITIVE[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def through(x: Tensor, scale: float | Tensor) -> Tensor:
    """x / scale in float32 through FP8, times scale in float32, in x's dtype."""
    factor = torch.as_tensor(scale, dtype=torch.float32)
    codes = torch.from_numpy(nearest((x.detach().float() / factor).numpy())).float()
    return (codes * factor).to(x.dtype)


@contextmanager
def quantized_like_this(
    module: nn.Module, inputs: Mapping[str, float], groups: Sequence[Sequence[str]]
) -> Iterator[None]:
    """While this lasts, the named linear layers of `module` compute on values that went through FP8.

    groups: layers that share one weight scale; all others have their own.
    """
    linears = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    share = {name: group for group in groups for name in group}
    before, handles = {}, []
    for name in inputs:
        group = share.get(name, (name,))
        top = max(float(linears[other].weight.detach().abs().max()) for other in group)
        before[name] = through(linears[name].weight.data, top / 448)
        scale = inputs[name]
        handles.append(
            linears[name].register_forward_pre_hook(lambda _, args, scale=scale: (through(args[0], scale),))
        )
    kept = {name: linears[name].weight.data for name in inputs}
    for name, weight in before.items():
        linears[name].weight.data = weight
    try:
        yield
    finally:
        for name, weight in kept.items():
            linears[name].weight.data = weight
        for handle in handles:
            handle.remove()


def merged(names: Sequence[str]) -> list[list[str]]:
    """The layers of a Llama that read the same rows: q, k, v; gate, up."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem, _, part = name.rpartition(".")
        kind = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gu", "up_proj": "gu"}
        groups.setdefault(f"{stem}.{kind.get(part, part)}", []).append(name)
    return list(groups.values())
