"""Which drafts stay: two rules that emit exactly the target's distribution p, whatever the draft proposes.

`target_sampling` draws x ~ p at the root and follows the tree while x is a child. The children were fixed
before the coin was drawn, so what is emitted is p itself, and a token is the same function of (its logits,
seed, position) for every tree: decoding with a seed gives the tokens of plain decoding with that seed. It
accepts with the sum of p over the children, the most any rule can for given children.

`rejection_sampling` is for children that were drawn from q without replacement: try them in drawn order,
accept x with min(1, p(x)/q(x)), and on rejection go on with norm(max(p - q, 0)) and with q without x
(SpecInfer §4.2 without its replacement; recursive rejection sampling of RSD).

B batch, N nodes, D depth of the tree, V vocabulary, Vd draft vocabulary, K most children of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_run.decoding.drafting import SampledRows, TreePlan
from eagle_run.decoding.rng import ACCEPT, TOKEN, uniform
from eagle_run.decoding.sampling import SamplingTensors, argmax, distribution, draw, draw_weights, to_weights


@dataclass(frozen=True)
class AcceptedPath:
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


def target_sampling(
    plan: TreePlan, logits: Tensor, settings: SamplingTensors, position: Tensor
) -> AcceptedPath:
    """Follows the target's own draws down the tree.

    logits [B, N, V] of the plan's nodes, position i64[B] of the root: the token after a node of depth d is
    decided by the coin (seed, position + d + 1). Only the rows on the path are turned into probabilities;
    when every slot is greedy there are none, only argmax.
    """
    nodes = torch.arange(plan.tokens.shape[1], device=logits.device)  # [N]
    greedy = settings.flags.all_greedy
    coins = None if greedy else uniform(settings.seed[:, None], _positions(plan, position), TOKEN)  # [B, D+1]

    def decide(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        row = _pick(logits, node)  # [B, V]
        token = argmax(row) if coins is None else draw(distribution(row, settings), coins[:, depth])
        hit = (plan.parents == node[:, None]) & (plan.tokens == token[:, None]) & plan.alive  # [B, N]
        return torch.where(hit, nodes, -1).amax(1), token

    return _follow(decide, plan.shape.depth, torch.zeros_like(position))


def rejection_sampling(
    plan: TreePlan, logits: Tensor, settings: SamplingTensors, position: Tensor
) -> AcceptedPath:
    """Down a tree whose children were drawn from q (`sample_children`, `TreeBuilder.add(q=...)`).

    Arguments and result as for `target_sampling`; without levels (plain decoding) both are the same. In a
    greedy slot p is all on the argmax, which is then accepted if it is a child, whatever q says. Raises
    ValueError for a plan grown without q.
    """
    if not plan.shape.levels:
        return target_sampling(plan, logits, settings, position)
    drafted = plan.sampled
    if drafted is None:
        raise ValueError("the sampled rule needs a plan whose levels were added with q")
    ranks = torch.arange(plan.shape.top_k, device=logits.device)
    positions = _positions(plan, position)
    last_coins = uniform(settings.seed[:, None], positions, TOKEN)  # [B, D+1]
    coins = uniform(settings.seed[:, None, None], positions[..., None], ACCEPT, ranks)  # [B, D+1, K]

    def decide(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        weights = to_weights(distribution(_pick(logits, node), settings))  # [B, V]
        if depth == plan.shape.depth:
            return torch.full_like(node, -1), draw_weights(weights, last_coins[:, depth])
        most = plan.shape.levels[depth].children
        child, token, weights = _try_children(weights, drafted, node, coins[:, depth, :most])
        return child, torch.where(child >= 0, token, draw_weights(weights, last_coins[:, depth]))

    return _follow(decide, plan.shape.depth, torch.zeros_like(position))


def _follow(decide: Callable[[Tensor, int], tuple[Tensor, Tensor]], depth: int, root: Tensor) -> AcceptedPath:
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
    return AcceptedPath(torch.stack(path, 1), length, torch.stack(tokens, 1))


def _try_children(
    weights: Tensor, drafted: SampledRows, node: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One node of `rejection_sampling`: (accepted child i64[B] or -1, its token, rest of p as weights).

    weights i64[B, V] of p, node i64[B], coins f64[B, K].
    """
    most = coins.shape[1]
    row = drafted.row_of_node[node]  # [B]
    kids = drafted.children[node][:, :most]  # [B, K], -1 where there is none
    drawn = _pick(drafted.tokens, row)[:, :most].where(kids >= 0, -1)  # [B, K], -1 where missing too
    q = _pick(drafted.q, row).double()  # [B, Vd]
    ids = drafted.draft_to_target
    inside = weights if ids is None else weights.index_select(1, ids)  # [B, Vd]
    outside = weights.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)  # [B, 1]
    rank, left = _reject(inside.double(), outside, q, drawn, coins)

    child = torch.where(rank >= 0, kids.gather(1, rank.clamp(min=0)), -1).squeeze(1)
    token = drawn.gather(1, rank.clamp(min=0)).clamp(min=0).squeeze(1)
    if ids is None:
        return child, token, left.long()
    return child, ids[token], weights.index_copy(1, ids, left.long())


def _reject(p: Tensor, outside: Tensor, q: Tensor, drawn: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Tries the drawn tokens in turn: (rank i64[B, 1] of the accepted one or -1, what is left of p).

    p f64[B, Vd]: weights on the draft's vocabulary. The rest of p, `outside` in sum i64[B, 1], can not be
    drafted; so nothing is ever taken from it, and leaving p and q unnormalised leaves it as it is. q f64[B,
    Vd] on the grid of weights, so that its sums are exact. drawn i64[B, K] (-1: no such child), coins
    f64[B, K].
    """
    rank = torch.full_like(drawn[:, :1], -1)  # [B, 1]
    p_mass = p.sum(-1, keepdim=True) + outside
    for place in range(drawn.shape[1]):
        here = drawn[:, place, None]  # [B, 1]
        x = here.clamp(min=0)
        q_mass = q.sum(-1, keepdim=True).clamp(min=2.0**-52)  # of the tokens not yet tried
        ratio = p_mass / q_mass
        tried = (rank < 0) & (here >= 0)
        # coin < p(x) / q(x), strictly: where p(x) = 0 even coin 0 rejects
        accepted = tried & (coins[:, place, None] * q.gather(1, x) * ratio < p.gather(1, x))
        rank = torch.where(accepted, place, rank)
        rest = (p - q * ratio).clamp(min=0)
        rest_mass = rest.sum(-1, keepdim=True) + outside
        # A mass below 2^-40 is rounding: p equals q, and rejects with no more than that probability.
        rejected = tried & ~accepted & (rest_mass > 2.0**12)
        p = torch.where(rejected, rest, p)
        p_mass = torch.where(rejected, rest_mass, p_mass)
        q = q.scatter(1, x, 0.0)
    return rank, p


def _positions(plan: TreePlan, root: Tensor) -> Tensor:
    """Absolute positions of the tokens that a round may emit: i64[B] -> i64[B, D+1]."""
    return root[:, None] + torch.arange(1, plan.shape.depth + 2, device=root.device)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b]] for every slot: [B, N, ...], i64[B] -> [B, ...]."""
    first = torch.arange(x.shape[0], device=x.device) * x.shape[1]
    return x.flatten(0, 1).index_select(0, first + index)
