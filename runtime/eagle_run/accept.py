"""Which drafts stay: two rules that emit exactly the target's distribution p, whatever the draft proposes.

`walk` draws x ~ p at the root and follows the tree while x is a child. The children were fixed before the
coin was drawn, so what is emitted is p itself, and a token is the same function of (its logits, seed,
position) for every tree: decoding with a seed gives the tokens of plain decoding with that seed. It accepts
with the sum of p over the children, the most any rule can for given children.

`walk_sampled` is rejection sampling for children that were drawn from q without replacement: try them in
drawn order, accept x with min(1, p(x)/q(x)), and on rejection go on with norm(max(p - q, 0)) and with q
without x (SpecInfer §4.2 without its replacement; recursive rejection sampling of RSD).

B batch, N nodes, D depth of the tree, V vocabulary, Vd draft vocabulary, K most children of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_run.rng import ACCEPT, TOKEN, uniform
from eagle_run.sampling import SettingsTensors, argmax, distribution, draw, draw_weights, to_weights
from eagle_run.tree import SampledRows, TreePlan


@dataclass(frozen=True)
class Path:
    """How far a round came.

    nodes i64[B, D+1]: the accepted path, root first, its last node repeated to the end. length i64[B]:
    nodes on it = tokens emitted = accepted drafts + 1. tokens i64[B, D+1]: emitted ones first (the accepted
    drafts, then the new token, which is the next root), anything after `length`.
    """

    nodes: Tensor
    length: Tensor
    tokens: Tensor

    @property
    def root(self) -> Tensor:
        """The next root i64[B]: the last token emitted."""
        return self.tokens.gather(1, self.length[:, None] - 1).squeeze(1)


def walk(plan: TreePlan, logits: Tensor, settings: SettingsTensors, position: Tensor) -> Path:
    """Follows the target's own draws down the tree.

    logits [B, N, V] of the plan's nodes, position i64[B] of the root: the token after a node of depth d is
    decided by the coin (seed, position + d + 1). Only the rows on the path are turned into probabilities;
    when every slot is greedy there are none, only argmax.
    """
    slots = torch.arange(logits.shape[0], device=logits.device)
    nodes = torch.arange(plan.tokens.shape[1], device=logits.device)  # [N]

    def decide(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        row = logits[slots, node]  # [B, V]
        if settings.switches.all_greedy:
            token = argmax(row)
        else:
            token = draw(distribution(row, settings), uniform(settings.seed, position + depth + 1, TOKEN))
        hit = (plan.parents == node[:, None]) & (plan.tokens == token[:, None]) & plan.alive  # [B, N]
        return torch.where(hit, nodes, -1).amax(1), token

    return _follow(decide, plan.shape.depth, torch.zeros_like(position))


def walk_sampled(plan: TreePlan, logits: Tensor, settings: SettingsTensors, position: Tensor) -> Path:
    """Rejection sampling down a tree whose children were drawn from q (`sample_children`, `Grow.add(q=...)`).

    Arguments and result as for `walk`; without levels (plain decoding) both are the same. Greedy slots accept
    the argmax if it is a child, whatever q says. Raises ValueError for a plan grown without q.
    """
    if not plan.shape.levels:
        return walk(plan, logits, settings, position)
    drafted = plan.sampled
    if drafted is None:
        raise ValueError("the sampled rule needs a plan whose levels were added with q")
    slots = torch.arange(logits.shape[0], device=logits.device)
    tries = [*(level.children for level in plan.shape.levels), 0]  # most children at each depth

    def decide(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        p = distribution(logits[slots, node], settings)  # [B, V]
        return _try_children(
            p, drafted, node, most=tries[depth], settings=settings, position=position + depth + 1
        )

    return _follow(decide, plan.shape.depth, torch.zeros_like(position))


def _follow(decide: Callable[[Tensor, int], tuple[Tensor, Tensor]], depth: int, root: Tensor) -> Path:
    """Walks from node `root` i64[B], all zeros. decide(node, depth) -> (child i64[B] or -1, token i64[B])."""
    node, going, length = root, root == 0, torch.ones_like(root)
    path, tokens = [node], []
    for level in range(depth + 1):
        child, token = decide(node, level)  # a slot that stopped decides again, for nothing
        tokens.append(token)
        if level < depth:
            going = going & (child >= 0)
            node = torch.where(going, child, node)
            path.append(node)
            length = length + going
    return Path(torch.stack(path, 1), length, torch.stack(tokens, 1))


def _try_children(
    p: Tensor, drafted: SampledRows, node: Tensor, *, most: int, settings: SettingsTensors, position: Tensor
) -> tuple[Tensor, Tensor]:
    """One node of `walk_sampled`: (accepted child i64[B] or -1, token i64[B] for `position`).

    p f32[B, V], node and position i64[B], most: tries at this depth.
    """
    weights = to_weights(p)  # [B, V]
    last_coin = uniform(settings.seed, position, TOKEN)
    if most == 0:
        return torch.full_like(node, -1), draw_weights(weights, last_coin)
    slots = torch.arange(p.shape[0], device=p.device)
    row = drafted.row_of_node[node]  # [B]
    q = drafted.q[slots, row].double()  # [B, Vd], on the grid of weights: its sums are exact
    drawn = drafted.tokens[slots, row, :most]  # [B, most], -1 where missing
    kids = drafted.children[node, :most]  # [B, most], -1 where there is none
    greedy = (settings.temperature == 0)[:, None]
    coins = uniform(settings.seed[:, None], position[:, None], ACCEPT, torch.arange(most, device=p.device))
    coins = torch.where(greedy, 0.0, coins)  # p is 0 or 1: accepted if and only if it is the argmax

    ids = drafted.draft_to_target
    total = weights.sum(-1, keepdim=True).double()  # [B, 1]
    inside = weights if ids is None else weights[:, ids]  # [B, Vd]
    outside = (total - inside.sum(-1, keepdim=True)) / total  # [B, 1]
    rank, residual, scale = _reject(
        inside / total, outside, q, drawn.where(kids >= 0, -1), coins, keep=greedy
    )

    left = to_weights(residual)  # [B, Vd]
    if ids is not None:
        left = to_weights(weights / total * scale).index_copy(1, ids, left)  # /2^52, [B, V]
    accepted = rank >= 0  # [B, 1]
    child = torch.where(accepted, kids.gather(1, rank.clamp(min=0)), -1)
    token = drawn.gather(1, rank.clamp(min=0)).clamp(min=0)
    if ids is not None:
        token = ids[token]
    return child.squeeze(1), torch.where(accepted.squeeze(1), token.squeeze(1), draw_weights(left, last_coin))


def _reject(
    residual: Tensor, outside: Tensor, q: Tensor, drawn: Tensor, coins: Tensor, *, keep: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tries the drawn tokens in turn: (rank i64[B, 1] of the accepted one or -1, residual, scale f64[B, 1]).

    residual f64[B, Vd]: p on the draft's vocabulary; p outside of it sums to `outside` f64[B, 1] and is only
    ever rescaled, by `scale`: residual + scale * outside sums to 1 throughout. q f64[B, Vd], drawn i64[B, K]
    (-1: no such child), coins f64[B, K]. Where `keep` bool[B, 1], a rejection leaves p as it is.
    """
    rank = torch.full_like(drawn[:, :1], -1)  # [B, 1]
    scale = torch.ones_like(outside)
    for place in range(drawn.shape[1]):
        here = drawn[:, place, None]  # [B, 1]
        x = here.clamp(min=0)
        untried = q.sum(-1, keepdim=True)  # dividing by it renormalises q without the tried tokens
        tried = (rank < 0) & (here >= 0)
        # coin < (p(x) / q(x)), strictly: at p(x) = 0 even coin 0 rejects
        accepted = tried & (coins[:, place, None] * q.gather(1, x) < residual.gather(1, x) * untried)
        rank = torch.where(accepted, place, rank)
        rest = (residual - q / untried.clamp(min=2.0**-52)).clamp(min=0)
        mass = rest.sum(-1, keepdim=True) + scale * outside
        # Without mass p equals q, which only rounding rejects: then p stays.
        rejected = tried & ~accepted & ~keep & (mass > 0)
        residual = torch.where(rejected, rest / mass, residual)
        scale = torch.where(rejected, scale / mass, scale)
        q = q.scatter(1, x, 0.0)
    return rank, residual, scale
