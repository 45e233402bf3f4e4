"""One round: draft → verify → accept → commit, without a host read.

Every tensor has a fixed shape and nothing depends on a value the host would have to wait for, so a round
can be captured as one CUDA graph. Before it, n tokens are in the target cache and the root is the token
after them, at position n; the draft cache holds n pairs but for the pending ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_run.decoding.acceptance import AcceptedPath, rejection_sampling, target_sampling
from eagle_run.decoding.drafting import TreeBuilder, TreePlan, expand, start
from eagle_run.decoding.sampling import sample_children
from eagle_run.decoding.tree import Level, TreeShape
from eagle_run.engine.model_runner import BatchState, Forward, ModelRunner
from eagle_run.engine.prefill import fill


def step(
    runner: ModelRunner, state: BatchState, shape: TreeShape, *, kv: int, rule: str = "topk"
) -> AcceptedPath:
    """Runs one round for all slots and returns the accepted path; `state` and the caches move on with it.

    `kv` is the attended width of the caches: at least the longest slot's n + `shape.cache_rows`.
    `rule` is "topk" or "sampled" (see `accept`).
    """
    return observed_step(runner, state, shape, kv=kv, rule=rule)[2]


def observed_step(
    runner: ModelRunner, state: BatchState, shape: TreeShape, *, kv: int, rule: str = "topk"
) -> tuple[TreePlan, Forward, AcceptedPath]:
    """`step`, for those who want to see the tree and what the target said of it beside the path.

    The forward's outputs are buffers: the next round overwrites them.
    """
    plan = draft(runner, state, shape, kv=kv, rule=rule)
    seen = verify(runner, state, plan, kv=kv)
    path = accept(state, plan, seen, rule=rule)
    commit(runner, state, shape, path, seen)
    return plan, seen, path


def draft(runner: ModelRunner, state: BatchState, shape: TreeShape, *, kv: int, rule: str) -> TreePlan:
    """Grows a tree below the root, level by level (EAGLE-2 §4.1; the first level is the primed pair's)."""
    grow = start(runner.tables(shape), state.root, runner.draft_to_target)
    if not shape.levels:
        return grow.plan()
    logits, hidden = _prime(runner, state, kv)  # [B, 1, Vd], [B, 1, Hd]
    for level in shape.levels:
        if level.depth > 1:
            logits, hidden = _extend(runner, state, grow, level, hidden, kv=kv)  # [B, w, Vd], [B, w, Hd]
        if rule == "sampled":
            tokens, q = sample_children(logits, level.children, state.settings, state.length + level.depth)
            grow = grow.add(tokens, q=q)
        else:
            logq = torch.log_softmax(logits, -1)
            grow = grow.add(*expand(logq, grow.frontier.scores, level.children))
    return grow.plan()


def verify(runner: ModelRunner, state: BatchState, plan: TreePlan, *, kv: int) -> Forward:
    """One target forward over the tree: logits and features of every node."""
    nodes = plan.tokens.shape[1]
    forward = runner.target(nodes, nodes, kv)
    fill(
        forward.inputs,
        input_ids=plan.tokens,
        position_ids=state.length[:, None] + plan.depth,
        write_index=state.length,
        logits_index=torch.arange(nodes, device=runner.device).expand(runner.batch, -1),
    )
    show(forward.inputs["tree_mask"], state.length, plan.mask)
    forward.run()
    return forward


def accept(state: BatchState, plan: TreePlan, seen: Forward, *, rule: str) -> AcceptedPath:
    """How far down the tree the target's own choice goes, and the token that follows."""
    rules = {"topk": target_sampling, "sampled": rejection_sampling}
    return rules[rule](plan, seen.outputs["logits"], state.settings, state.length)


def commit(
    runner: ModelRunner, state: BatchState, shape: TreeShape, path: AcceptedPath, seen: Forward
) -> None:
    """Makes the path the new end of the sequence: KV rows into place, pairs for the next prime, new root."""
    if shape.kind in ("dynamic", "static"):  # a chain's accepted rows are in place already
        _compact(runner.target_cache, state.length, path.nodes)
    grown = torch.where(state.active, path.length, 0)  # [B]
    state.length += grown
    state.root.copy_(torch.where(state.active, path.root, state.root))
    if runner.has_draft:
        features = seen.outputs["features"]  # [B, N, n*H]
        picked = features.gather(1, path.nodes[:, :, None].expand(-1, -1, features.shape[2]))
        rows = path.nodes.shape[1]
        state.pending_features[:, :rows] = picked
        state.pending_tokens[:, :rows] = path.tokens
        state.pending_count.copy_(grown)
    torch.cat((path.length[:, None], path.tokens), 1, out=state.report)


def _prime(runner: ModelRunner, state: BatchState, kv: int) -> tuple[Tensor, Tensor]:
    """Adds the pending pairs to the draft cache; logits and hidden of the last one, [B, 1, ·]."""
    rows = state.pending_tokens.shape[1]
    pairs = state.length - state.pending_count  # [B]: pairs that the draft cache holds
    forward = runner.draft(rows, 1, kv)
    last = (state.pending_count - 1).clamp(min=0)[:, None]  # a one-token prompt has no pair: row 0 stands in
    row = torch.arange(rows, device=runner.device)
    fill(
        forward.inputs,
        input_ids=state.pending_tokens,
        hidden=runner.fuse(state.pending_features),
        position_ids=pairs[:, None] + row,
        write_index=pairs,
        logits_index=last,
    )
    show(forward.inputs["tree_mask"], pairs, (row <= row[:, None]).expand(runner.batch, -1, -1))
    forward.run()
    return forward.outputs["logits"], _rows(forward.outputs["hidden_out"], last)


def _extend(
    runner: ModelRunner, state: BatchState, grow: TreeBuilder, level: Level, hidden: Tensor, *, kv: int
) -> tuple[Tensor, Tensor]:
    """Forwards a level's frontier; its rows see all pairs and their own ancestors."""
    frontier = grow.frontier
    forward = runner.draft(level.width, level.width, kv)
    position = state.length[:, None] + (level.depth - 2)  # a pair sits one before its token
    fill(
        forward.inputs,
        input_ids=frontier.input_ids,
        hidden=_rows(hidden, frontier.parent_rows),
        position_ids=position.expand(-1, level.width),
        write_index=state.length + level.offset,
        logits_index=torch.arange(level.width, device=runner.device).expand(runner.batch, -1),
    )
    show(forward.inputs["tree_mask"], state.length, frontier.mask)
    forward.run()
    return forward.outputs["logits"], forward.outputs["hidden_out"]


def show(mask: Tensor, prefix: Tensor, block: Tensor) -> None:
    """Fills `mask`: every row sees the first `prefix` rows of the cache and, beside them, what `block` says.

    mask bool [B, 1, T, KV], prefix i64[B], block bool [B, T, W]; prefix + W must not pass KV.
    """
    prefix = prefix[:, None, None]
    mask[:, 0] = torch.arange(mask.shape[3], device=mask.device) < prefix
    place = prefix + torch.arange(block.shape[2], device=mask.device)  # [B, 1, W]
    mask[:, 0].scatter_(2, place.expand_as(block), block)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values [B, T, X] at rows index i64 [B, R] → [B, R, X]."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _compact(cache: Tensor, length: Tensor, nodes: Tensor) -> None:
    """Moves the accepted nodes' rows to length, length + 1, and so on.

    cache [L, 2, B, Hkv, S, Dh], length i64 [B], nodes i64 [B, D+1]. Rows behind the accepted ones receive
    copies of the last: later rounds overwrite them unseen.
    """
    layers, _, batch, heads, _, width = cache.shape
    shape = (layers, 2, batch, heads, nodes.shape[1], width)
    source = (length[:, None] + nodes)[None, None, :, None, :, None].expand(shape)
    steps = torch.arange(nodes.shape[1], device=nodes.device)
    place = (length[:, None] + steps)[None, None, :, None, :, None].expand(shape)
    cache.scatter_(4, place, cache.gather(4, source))
