"""FP8 in eager torch: values are rounded to FP8 and scaled back, as the graph's Q/DQ pairs do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.quantize.fp8.calibrate import named_linears
from eagle_export.quantize.fp8.rewrite import to_fp8, weight_scale


def rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    """x through FP8 and back, in x's dtype."""
    return (to_fp8(x, scale).float() * scale).to(x.dtype)


@contextmanager
def fake_quantized(
    module: nn.Module, groups: Sequence[Sequence[str]], inputs: Mapping[str, float]
) -> Iterator[None]:
    """While this lasts, the linear layers in `groups` compute what an FP8 graph computes.

    groups: layers whose products are one product in the graph (`products`); each has one weight scale and the
    largest of its input scales. Their weights are put back afterwards.
    """
    linears = named_linears(module)
    handles: list[Any] = []
    originals: list[tuple[nn.Linear, Tensor]] = []
    try:
        for group in groups:
            scale = max(inputs[name] for name in group)
            shared = torch.stack([weight_scale(linears[name].weight.data) for name in group]).amax()
            for name in group:
                linear = linears[name]
                originals.append((linear, linear.weight.data))
                linear.weight.data = rounded(linear.weight.data, shared)

                def quantize(_: nn.Module, args: tuple[Tensor, ...], scale: float = scale) -> tuple[Tensor]:
                    return (rounded(args[0], scale),)

                handles.append(linear.register_forward_pre_hook(quantize))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for linear, weight in originals:
            linear.weight.data = weight


@contextmanager
def grouping(module: nn.Module) -> Iterator[list[list[str]]]:
    """Fills a list, during one forward, with the layers that read the same rows: one product in the graph."""
    groups: list[list[str]] = []
    seen: dict[int, tuple[Tensor, int]] = {}  # tensors are held so that no id is used twice
    handles = []
    for name, linear in named_linears(module).items():

        def note(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            x = args[0]
            if id(x) not in seen:
                seen[id(x)] = (x, len(groups))
                groups.append([])
            groups[seen[id(x)][1]].append(name)

        handles.append(linear.register_forward_pre_hook(note))
    try:
        yield groups
    finally:
        seen.clear()
        for handle in handles:
            handle.remove()
