"""Experts as plain products against Transformers' own blocks, which run one expert after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, Llama4TextConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from eagle_export.models import moe

HIDDEN, EXPERTS = 32, 7
_SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "qwen3_moe": (
        moe.qwen3_moe,
        lambda: Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(**_SIZES, num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=20)
        ),
    ),
    "qwen3_moe, shares that add up": (
        moe.qwen3_moe,
        lambda: Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                **_SIZES,
                num_experts=EXPERTS,
                num_experts_per_tok=2,
                moe_intermediate_size=20,
                norm_topk_prob=True,
            )
        ),
    ),
    "gpt_oss": (
        moe.gpt_oss,
        lambda: GptOssMLP(
            GptOssConfig(**_SIZES, num_local_experts=EXPERTS, num_experts_per_tok=3, intermediate_size=20)
        ),
    ),
    "llama4": (
        moe.llama4,
        lambda: Llama4TextMoe(
            Llama4TextConfig(**_SIZES, num_local_experts=EXPERTS, num_experts_per_tok=2, intermediate_size=20)
        ),
    ),
}


def block(kind: str, scale: float = 1.0) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """(ours, Transformers') over the same random weights, hidden states [B, T, H] -> [B, T, H]."""
    ours, make = BLOCKS[kind]
    module = make().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    for part in module.modules():  # its own loop over experts, not a kernel that it may choose
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"

    def first(out: Any, x: Tensor) -> Tensor:
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)

    return (lambda x: first(ours(module, x), x)), (lambda x: first(module(x), x))


def rows(batch: int, count: int) -> Tensor:
    return torch.randn(batch, count, HIDDEN, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", BLOCKS)
def test_equals_transformers(kind: str) -> None:
    ours, theirs = block(kind, 0.4)
    for batch, count in ((1, 1), (2, 9)):
        x = rows(batch, count)
        want = theirs(x)
        assert want.abs().amax() > 0.1
        torch.testing.assert_close(ours(x), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    ours, _ = block(kind, 0.4)
    x = rows(2, 9)
    whole = ours(x)
    for b in range(2):
        for t in range(9):
            torch.testing.assert_close(ours(x[b : b + 1, t : t + 1])[0, 0], whole[b, t], atol=1e-5, rtol=1e-5)


def test_what_experts_make_of_rows_that_are_not_theirs_does_not_count() -> None:
    """An expert with weights that pass the range of half precision for every row, and is never chosen."""
    module = BLOCKS["qwen3_moe"][1]().eval().requires_grad_(False).half()
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(6)) * 0.2)
    x = rows(1, 5).half().abs()
    module.gate.weight[2] = -10.0  # all rows are positive
    want = moe.qwen3_moe(module, x)
    module.experts.gate_up_proj[2] = 3e4
    assert not torch.isfinite(x[0] @ module.experts.gate_up_proj[2].T).any()
    assert torch.equal(moe.qwen3_moe(module, x), want)
    assert torch.isfinite(want).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_tie_between_experts_is_broken_by_choosing_one(kind: str) -> None:
    """Two experts of the same weights, in the router too: whichever is chosen, it counts once."""
    ours, make = BLOCKS[kind]
    module = make().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, weight in module.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator) * 0.4
        if weight.shape[0] == EXPERTS and "shared" not in name:
            drawn[3] = drawn[4]
        weight.copy_(drawn)
    x = rows(2, 12)
    ours_out, theirs = ours(module, x), module(x)
    pair = [out[0] if isinstance(out, tuple) else out for out in (ours_out, theirs)]
    torch.testing.assert_close(pair[0].reshape(x.shape), pair[1].reshape(x.shape), atol=1e-4, rtol=1e-4)
