"""Windows and chunks on a tree, attention sinks, rotation in pairs: each against the slow and obvious."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_export.models import ops

# Depths of the nodes of a tree, and which nodes are each node's ancestors (itself included).
DEPTHS = (0, 1, 1, 2, 2, 3)
ANCESTORS = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 1, 3, 5))


def tree_inputs(lengths: tuple[int, ...], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """A tree behind `lengths[b]` cached tokens: mask [B, 1, T, KV], positions [B, T], write index [B]."""
    mask = torch.zeros(len(lengths), 1, len(DEPTHS), width, dtype=torch.bool)
    for b, length in enumerate(lengths):
        mask[b, :, :, :length] = True
        for node, path in enumerate(ANCESTORS):
            mask[b, 0, node, [length + other for other in path]] = True
    start = torch.tensor(lengths)
    return mask, start[:, None] + torch.tensor(DEPTHS), start


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("span", [1, 2, 3, 5, 8, 40])
def test_a_narrowed_mask_says_it_node_by_node(kind: str, span: int) -> None:
    lengths, width = (7, 12, 0), 20
    mask, positions, write = tree_inputs(lengths, width)
    found = ops.narrow_mask(mask, positions, write, kind, span)
    for b, length in enumerate(lengths):
        for node, path in enumerate(ANCESTORS):
            held = {column: column for column in range(length)}
            held |= {length + other: length + DEPTHS[other] for other in path}
            own = length + DEPTHS[node]
            near = {
                column
                for column, position in held.items()
                if (own - position < span if kind == "window" else own // span == position // span)
            }
            assert set(found[b, 0, node].nonzero().flatten().tolist()) == near


def test_a_padded_row_keeps_its_key() -> None:
    """The second row sees only the first column, which is far behind its position: not nothing, or NaN."""
    mask = torch.zeros(1, 1, 2, 16, dtype=torch.bool)
    mask[0, 0, 0, :11] = True
    mask[0, 0, 1, 0] = True
    found = ops.narrow_mask(mask, torch.tensor([[10, 900]]), torch.tensor([10]), "window", 4)
    assert found[0, 0].nonzero().tolist() == [[0, 7], [0, 8], [0, 9], [0, 10], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_take_their_share_and_add_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator).to(dtype)  # [B, Hq, T, Dh]
    k, v = torch.randn(2, 2, 2, 24, 8, generator=generator).to(dtype)  # [B, Hkv, S, Dh] each
    sinks = torch.tensor([-1.0, 0.5, 2.0, 40.0]).to(dtype)
    mask, _, _ = tree_inputs((7, 12), 20)
    mask[0, 0, 5] = False  # a row that sees nothing
    found = ops.attention_with_sinks(q, k, v, mask, sinks=sinks, scale=0.3)
    for b in range(2):
        for head in range(4):
            scores = 0.3 * q[b, head].float() @ k[b, head // 2, :20].float().T  # [T, KV]
            scores = scores.masked_fill(~mask[b, 0], -torch.inf)
            with_sink = torch.cat((scores, sinks[head].float().expand(6, 1)), 1).softmax(1)[:, :-1]
            want = with_sink @ v[b, head // 2, :20].float()
            torch.testing.assert_close(found[b, head].float(), want, atol=3e-3, rtol=0)
    assert found.dtype == dtype
    assert not found[0, :, 5].any()


def test_sinks_with_the_bias_of_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 24, 8, generator=generator)
    sinks = torch.randn(4, generator=generator)
    mask, _, _ = tree_inputs((7, 12), 20)
    want = ops.attention_with_sinks(q, k, v, mask, sinks=sinks, scale=0.3)
    bias = ops.attention_bias(mask, 2, torch.float32)
    assert torch.equal(ops.attention_with_sinks(q, k, v, bias, sinks=sinks, scale=0.3), want)


def test_pairs_rotate_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 4, 8, generator=generator)  # [B, h, T, Dh]
    angle = torch.randn(2, 4, 4, generator=generator)  # [B, T, Dh/2]
    found = ops.rotary(x, angle.cos(), angle.sin(), interleaved=True)
    turned = (
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    torch.testing.assert_close(found, torch.view_as_real(turned).flatten(-2))
