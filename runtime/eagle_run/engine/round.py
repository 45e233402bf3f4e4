"""One round: draft → verify → accept → commit, without a host read.

Every tensor has a fixed shape and nothing depends on a value the host would have to wait for, so a round
can be captured as one CUDA graph. Before it, n tokens are in the target cache and the root is the token
after them, at position n; the draft cache holds n pairs but for the pending ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_run.decoding.acceptance import AcceptedPath, rejection_sampling, target_sampling
from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.drafting import TreeBuilder, TreePlan, expand, start
from eagle_run.decoding.sampling import sample_children
from eagle_run.decoding.tree import Level, TreeShape
from eagle_run.engine.model_runner import BatchState, Forward, ModelRunner, TokenLogprobs
from eagle_run.engine.prefill import fill

_ACCEPTANCE = {AcceptanceRule.TOPK: target_sampling, AcceptanceRule.SAMPLED: rejection_sampling}


@dataclass(frozen=True)
class RoundResult:
    """What a round did: the tree, the target's forward over it, and the accepted path.

    The forward's outputs are buffers: the next round overwrites them.
    """

    plan: TreePlan
    verified: Forward
    path: AcceptedPath


def run_round(
    runner: ModelRunner, state: BatchState, speculative: SpeculativeConfig, *, kv: int
) -> RoundResult:
    """Runs one round for all slots; `state` and the caches move on with it.

    `kv` is the attended width of the caches: at least the longest slot's n + `tree.cache_rows`.
    """
    plan = draft(runner, state, speculative, kv=kv)
    verified = verify(runner, state, plan, kv=kv)
    path = accept(state, plan, verified, speculative.acceptance)
    commit(runner, state, speculative.tree, path, verified)
    return RoundResult(plan, verified, path)


def draft(runner: ModelRunner, state: BatchState, speculative: SpeculativeConfig, *, kv: int) -> TreePlan:
    """Grows a tree below the root, level by level (EAGLE-2 §4.1; the first level is the primed pair's)."""
    tree = speculative.tree
    builder = start(runner.tables(tree), state.root, runner.draft_to_target)
    if not tree.levels:
        return builder.plan()
    logits, hidden = _prime(runner, state, kv)  # [B, 1, Vd], [B, 1, Hd]
    for level in tree.levels:
        if level.depth > 1:
            logits, hidden = _extend(runner, state, builder, level, hidden, kv=kv)  # [B, w, Vd], [B, w, Hd]
        if speculative.acceptance is AcceptanceRule.SAMPLED:
            tokens, q = sample_children(logits, level.children, state.sampling, state.length + level.depth)
            builder = builder.add(tokens, q=q)
        else:
            logq = torch.log_softmax(logits, -1)
            builder = builder.add(*expand(logq, builder.frontier.scores, level.children))
    return builder.plan()


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
    fill_mask(forward.inputs["tree_mask"], state.length, plan.mask)
    forward.run()
    return forward


def accept(state: BatchState, plan: TreePlan, verified: Forward, rule: AcceptanceRule) -> AcceptedPath:
    """How far down the tree the target's own choice goes, and the token that follows."""
    return _ACCEPTANCE[rule](plan, verified.outputs["logits"], state.sampling, state.length)


def commit(
    runner: ModelRunner, state: BatchState, tree: TreeShape, path: AcceptedPath, verified: Forward
) -> None:
    """Makes the path the new end of the sequence: KV rows into place, pairs for the next prime, new root."""
    if tree.kind in ("dynamic", "static"):  # a chain's accepted rows are in place already
        _compact(runner.target_cache, state.length, path.nodes)
    accepted = torch.where(state.active, path.length, 0)  # [B]
    state.length += accepted
    state.root.copy_(torch.where(state.active, path.root, state.root))
    if runner.has_draft:
        rows = path.nodes.shape[1]
        state.pending_features[:, :rows] = _rows(verified.outputs["features"], path.nodes)  # [B, P, n*H]
        state.pending_tokens[:, :rows] = path.tokens
        state.pending_count.copy_(accepted)
    torch.cat((path.length[:, None], path.tokens), 1, out=state.emitted)
    if state.logprobs is not None:
        _write_logprobs(state.logprobs, _rows(verified.outputs["logits"], path.nodes), path.tokens)


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
    fill_mask(forward.inputs["tree_mask"], pairs, (row <= row[:, None]).expand(runner.batch, -1, -1))
    forward.run()
    return forward.outputs["logits"], _rows(forward.outputs["hidden_out"], last)


def _extend(
    runner: ModelRunner, state: BatchState, builder: TreeBuilder, level: Level, hidden: Tensor, *, kv: int
) -> tuple[Tensor, Tensor]:
    """Forwards a level's frontier; its rows see all pairs and their own ancestors."""
    frontier = builder.frontier
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
    fill_mask(forward.inputs["tree_mask"], state.length, frontier.mask)
    forward.run()
    return forward.outputs["logits"], forward.outputs["hidden_out"]


def fill_mask(mask: Tensor, prefix: Tensor, block: Tensor) -> None:
    """Every row sees the first `prefix` rows of the cache and, beside them, what `block` says.

    mask bool [B, 1, T, KV], prefix i64[B], block bool [B, T, W]; prefix + W must not pass KV.
    """
    prefix = prefix[:, None, None]
    mask[:, 0] = torch.arange(mask.shape[3], device=mask.device) < prefix
    columns = prefix + torch.arange(block.shape[2], device=mask.device)  # [B, 1, W]
    mask[:, 0].scatter_(2, columns.expand_as(block), block)


def _write_logprobs(logprobs: TokenLogprobs, logits: Tensor, tokens: Tensor) -> None:
    """logits [B, P, V] of the rows that decided the tokens i64 [B, P]."""
    logp = torch.log_softmax(logits.float(), -1)
    chosen = logp.gather(2, tokens[:, :, None])
    places = slice(tokens.shape[1])
    logprobs.chosen[:, places] = chosen[:, :, 0]
    logprobs.rank[:, places] = 1 + (logp > chosen).sum(-1)
    if logprobs.alternatives:
        top = logp.topk(logprobs.alternatives, dim=-1)
        logprobs.top[:, places] = top.values
        logprobs.top_ids[:, places] = top.indices


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
    target = (length[:, None] + steps)[None, None, :, None, :, None].expand(shape)
    cache.scatter_(4, target, cache.gather(4, source))
