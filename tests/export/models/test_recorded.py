"""Recorded tensors: what is noted, done later, is what torch does at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle_export.checkpoints.weight_stream import InMemory
from eagle_export.models.recorded import Computed, Recorded


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


class Counted(InMemory):
    """A weight that notes when it is read."""

    reads = 0

    def load(self) -> Tensor:
        type(self).reads += 1
        return super().load()


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda a, b: a,
    "all of it": lambda a, b: a[...],
    "another type": lambda a, b: a.to(torch.bfloat16),
    "two types": lambda a, b: a.to(torch.bfloat16).to(torch.float16),
    "device and type": lambda a, b: a.to(device="cpu", dtype=torch.float16),
    "transposed": lambda a, b: a.T.contiguous(),
    "stacked": lambda a, b: torch.stack([a, b], dim=0),
    "joined": lambda a, b: torch.cat([a, b.to(torch.float32)], dim=1),
    "one below the other": lambda a, b: torch.cat([a, b[:2], b.to(torch.float16)]),
    "stacked within": lambda a, b: torch.stack([a, b.to(torch.bfloat16).float()], dim=-1),
    "experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1).to(torch.bfloat16),
    "a half": lambda a, b: a.chunk(2, dim=1)[1],
    "a third": lambda a, b: torch.split(a, [2, 1, 1], dim=1)[2],
    "rows": lambda a, b: a[1:3],
    "stacked halves": lambda a, b: torch.stack([x.to(torch.float16) for x in (a, b)]).transpose(1, 2)[:, 1:],
    "a parameter": lambda a, b: torch.nn.Parameter(a, requires_grad=False),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_done_later_is_what_is_done_at_once(name: str) -> None:
    step, a, b = STEPS[name], drawn(6, 4), drawn(6, 4) * 3
    expected = step(a, b).detach()
    Counted.reads = 0
    found = step(Recorded(Counted(a)), Recorded(Counted(b)))
    assert isinstance(found, Recorded)
    assert Counted.reads == 0
    assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "cpu")
    weight = found.weight
    assert (weight.shape, weight.dtype) == (tuple(expected.shape), expected.dtype)
    assert torch.equal(weight.load(), expected)
    for start in range(len(expected)):
        assert torch.equal(weight.rows(start, start + 1), expected[start : start + 1])
    assert torch.equal(weight.rows(0, len(expected)), expected)


def test_a_weight_that_is_only_passed_on_or_converted_can_be_read_by_rows() -> None:
    for name in ("nothing", "all of it", "two types", "device and type", "a parameter"):
        found = STEPS[name](Recorded(InMemory(drawn(6, 4))), Recorded(InMemory(drawn(6, 4))))
        assert not isinstance(found.weight, Computed), name


def test_writing_into_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"writes into a weight that was not read"):
        Recorded(InMemory(drawn(2, 2))).zero_()


def test_two_are_compared_by_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_export.models.recorded._VALUES", 8)  # two rows at a time
    a, other = drawn(7, 4), drawn(7, 4)
    other[6, 3] += 1
    found = Recorded(InMemory(a))
    assert torch.equal(found, Recorded(InMemory(a.clone())))
    assert not torch.equal(found, Recorded(InMemory(other)))
    assert not torch.equal(found, Recorded(InMemory(a[:6])))
    assert not torch.equal(found, Recorded(InMemory(a.double())))
