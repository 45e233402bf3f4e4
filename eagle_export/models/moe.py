"""Mixtures of experts as plain products: every expert for every row, and those not chosen count nothing.

A graph has fixed operators, and a tree's verification asks for 1 to 64 rows a sequence. With E experts, k of
them a row, and N rows, there are two ways to compute them without a loop over whatever was chosen:

gathered   each row fetches its k experts: N * k expert matrices are read, and written, and read again, since
           a gather is a copy. Cheapest for N * 3k < E: 2 rows of gpt-oss-20b (E=32, k=4), 5 of Qwen3-30B-A3B
           (E=128, k=8). The chunk of a prompt (N=512) would copy 4096 experts a layer, 38 GB in that model.
dense      all E are read once, whatever N. The experts that a tree of 60 rows chooses together are
           E (1 - (1 - k/E)^60): 32 of 32 and 125 of 128. Nothing that a tree needs is read twice, and nothing
           that it does not need is read at all.

So dense it is: verifying a tree, the forward that all this is for, reads what it must. A single row reads E/k
times more than it must (8 and 16 times), which makes plain decoding slow, and speedups over it flattering;
docs/targets.md says so too. A row's result cannot depend on the rows beside it.

Shapes: N = B * T rows, E experts, H hidden, I inner. Weights are Transformers' own parameters: [E, 2I, H] and
[E, H, I] for Qwen3, [E, H, 2I] and [E, I, H] for gpt-oss and Llama 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_export.models import ops


def qwen3_moe(self: Any, hidden_states: Tensor) -> Tensor:
    """In place of Qwen3MoeSparseMoeBlock.forward: hidden_states [B, T, H] -> [B, T, H]."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])  # [N, H]
    router, experts = self.gate, self.experts
    logits = ops.linear(rows, router.weight)  # [N, E]
    top, chosen = logits.softmax(-1, dtype=torch.float32).topk(router.top_k)  # [N, k]
    if router.norm_topk_prob:
        top = top / top.sum(-1, keepdim=True)
    gate, up = _halves(rows @ experts.gate_up_proj.transpose(1, 2))  # [E, N, I]
    inner = experts.act_fn(gate) * up
    mixed = _mix(inner, _shares(logits, chosen, top), experts.down_proj.transpose(1, 2))
    return mixed.view(hidden_states.shape)


def gpt_oss(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """In place of GptOssMLP.forward: hidden_states [B, T, H] -> [B, T, H] and the shares [N, E]."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])  # [N, H]
    router, experts = self.router, self.experts
    logits = ops.linear(rows, router.weight, router.bias)  # [N, E]
    top, chosen = logits.topk(router.top_k)  # [N, k]
    shares = _shares(logits, chosen, top.softmax(-1))
    both = rows @ experts.gate_up_proj + experts.gate_up_proj_bias[:, None]  # [E, N, 2I]
    gate, up = both[..., ::2], both[..., 1::2]
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    inner = (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))  # [E, N, I]
    mixed = _mix(inner, shares, experts.down_proj) + shares @ experts.down_proj_bias
    return mixed.view(hidden_states.shape), shares


def llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """In place of Llama4TextMoe.forward: the shares scale what goes into the experts, not what comes out."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])  # [N, H]
    experts = self.experts
    logits = ops.linear(rows, self.router.weight)  # [N, E]
    top, chosen = logits.topk(self.router.top_k)  # [N, k]
    shares = _shares(logits, chosen, top.float().sigmoid())
    scaled = rows * shares.t()[..., None]  # [E, N, H]: all zero for an expert that was not chosen
    gate, up = _halves(scaled @ experts.gate_up_proj)  # [E, N, I]
    routed = ((up * experts.act_fn(gate)) @ experts.down_proj).sum(0)  # [N, H]
    return self.shared_expert(hidden_states) + routed.view(hidden_states.shape), logits


def _shares(logits: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """[N, E]: `share` [N, k] of the experts `chosen` [N, k], and 0 for all others."""
    return torch.zeros_like(logits).scatter(-1, chosen, share.to(logits.dtype))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `chunk(2, -1)`, which may come out of a trace as a sequence; compilers know none."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _mix(inner: Tensor, shares: Tensor, down: Tensor) -> Tensor:
    """inner [E, N, I], shares [N, E], down [E, I, H] -> [N, H].

    What an expert makes of rows that it was not chosen for may pass the range of 16 bits: it is dropped, not
    multiplied by 0.
    """
    share = shares.t()[..., None]  # [E, N, 1]
    return ((inner * share).masked_fill(share == 0, 0.0) @ down).sum(0)
