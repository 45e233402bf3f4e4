"""The draft tree's growth, level by level, into the plan that the target verifies.

A dynamic tree (EAGLE-2 §4), a static one (EAGLE-1), a chain and plain decoding are one description with other
tables. A round drafts like this (`tables = TreeTables.build(shape, device)` once, outside any capture):

    grow = start(tables, root, draft_to_target)
    for level in shape.levels:  # level 1 reads the primed pair's logits, the others forward grow.frontier
        tokens, scores = expand(log_softmax(logits), grow.frontier.scores, level.children)
        grow = grow.add(tokens, scores)
    plan = grow.plan()

or, for children drawn from q, `tokens, q = sample_children(...)` and `grow = grow.add(tokens, q=q)`.

B batch, N nodes with the root, w rows and k children of a level, C candidates, R draft rows, Vd draft
vocabulary. A *candidate* is any child that was considered. Flat order is level by level, row by row, best
(or first drawn) child first, so parents precede children. A *row* is a node that the draft forwards: row 0
is the primed pair (its token is the root, its KV belongs to the cache's prefix), rows 1..R are the
frontiers of levels 2 and up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_run.decoding.tree import TreeShape, children_of
from eagle_run.errors import UsageError


@dataclass(frozen=True)
class FixedTables:
    """What is known beforehand of a tree that is not dynamic.

    final i64[N-1]: flat candidates of the nodes. parents i64[N], -1 for the root. depth i64[N]. mask
    bool[N, N]. row_of_node i64[N]. children i64[N, K]: nodes, -1 where there is none; K = top_k.
    """

    final: Tensor
    parents: Tensor
    depth: Tensor
    mask: Tensor
    row_of_node: Tensor
    children: Tensor


@dataclass(frozen=True)
class TreeTables:
    """The constants of a shape on a device. Build it once and keep it: building copies from the host.

    candidate_row i64[C]: row that gave a candidate. candidate_depth i64[C]. own_row bool[R, R]: the identity.
    selects: per level its `select` as i64, or None. fixed: None for a dynamic tree.
    """

    shape: TreeShape
    candidate_row: Tensor
    candidate_depth: Tensor
    own_row: Tensor
    selects: tuple[Tensor | None, ...]
    fixed: FixedTables | None

    @classmethod
    def build(cls, shape: TreeShape, device: torch.device | str = "cpu") -> TreeTables:
        def table(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        rows, depths = [], []
        for level in shape.levels:
            first_row = level.offset + (level.depth > 1)
            rows += [first_row + i // level.children for i in range(level.width * level.children)]
            depths += [level.depth] * (level.width * level.children)
        fixed = None
        if shape.table is not None:
            lines: list[list[int]] = []  # each node's ancestors and itself
            for node, parent in enumerate(shape.table):
                lines.append([*(lines[parent] if node else []), node])
            fixed = FixedTables(
                final=table(shape.final),
                parents=table(shape.table),
                depth=table([len(line) - 1 for line in lines]),
                mask=table([[node in line for node in range(shape.nodes)] for line in lines]).bool(),
                row_of_node=table(shape.row_of_node),
                children=table(
                    [kids + [-1] * (shape.top_k - len(kids)) for kids in children_of(shape.table)]
                ),
            )
        return cls(
            shape=shape,
            candidate_row=table(rows),
            candidate_depth=table(depths),
            own_row=torch.eye(shape.draft_rows, dtype=torch.bool, device=device),
            selects=tuple(None if level.select is None else table(level.select) for level in shape.levels),
            fixed=fixed,
        )


@dataclass(frozen=True)
class Frontier:
    """The rows that the draft forwards next. Level 1 is the primed pair: of it only `scores` is of use.

    input_ids i64[B, w]: target ids, always valid ones. parent_rows i64[B, w]: row of the previous forward
    whose hidden_out is this row's hidden (for level 2 the primed pair's: 0). mask bool[B, w, R]: which
    draft rows each row sees, itself included; the whole prefix comes on top. scores f32[B, w]: sums of
    log-probabilities. The rows' KV goes to level.offset behind the accepted pairs; a row's position is the
    root's + level.depth - 2, since a pair (feature f_t, token x_t+1) sits at t.
    """

    input_ids: Tensor
    parent_rows: Tensor
    mask: Tensor
    scores: Tensor


@dataclass(frozen=True)
class SampledRows:
    """What the sampled rule needs of the draft: the q of every row and the children drawn from it.

    q f32[B, 1+R, Vd]. tokens i64[B, 1+R, K]: draft ids in drawn order, -1 where missing. row_of_node i64[N]
    and children i64[N, K] as in TreeTables. draft_to_target i64[Vd] or None for the identity.
    """

    q: Tensor
    tokens: Tensor
    row_of_node: Tensor
    children: Tensor
    draft_to_target: Tensor | None


@dataclass(frozen=True)
class TreePlan:
    """The tree that the target verifies, root first, parents before children.

    tokens i64[B, N]: target ids, always valid ones. parents i64[B, N]: -1 for the root. depth i64[B, N]: 0
    for the root; a node's position is the root's + depth. mask bool[B, N, N]: column j is an ancestor of
    row i, or i itself. alive bool[B, N]: false for a node whose token does not exist, which is never
    accepted. Tensors of fixed trees are expanded views: do not write to them. sampled: set for the sampled
    rule.
    """

    shape: TreeShape
    tokens: Tensor
    parents: Tensor
    depth: Tensor
    mask: Tensor
    alive: Tensor
    sampled: SampledRows | None = None


def expand(logq: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely children of each row, best first.

    logq f32[B, w, Vd], scores f32[B, w] -> draft ids i64[B, w*k], scores f32[B, w*k]. A child's score is its
    parent's plus logq, which is cut at 0: rounding must not let a child outscore its parent, or the reranked
    set might not be connected.
    """
    best = logq.topk(k, dim=-1)  # [B, w, k]
    return best.indices.flatten(1), (scores.unsqueeze(-1) + best.values.clamp(max=0)).flatten(1)


def choose_frontier(scores: Tensor, width: int) -> Tensor:
    """The `width` best candidates, best first, ties to the lower index: f32[B, c] -> i64[B, width]."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :width]


def rerank(scores: Tensor, count: int) -> Tensor:
    """The `count` best of all candidates in flat order: f32[B, C] -> i64[B, count].

    Ties go to the lower index, which is the shallower candidate; so a parent is taken before its children.
    """
    return choose_frontier(scores, count).sort(-1).values


def start(tables: TreeTables, root: Tensor, draft_to_target: Tensor | None = None) -> TreeBuilder:
    """A tree with only its root: i64[B] target ids. draft_to_target i64[Vd] holds absolute target ids."""
    batch, rows = root.shape[0], tables.shape.draft_rows
    nothing = root.new_zeros(batch, 1)
    mask = torch.zeros(batch, 1, rows, dtype=torch.bool, device=root.device)
    frontier = Frontier(input_ids=root[:, None], parent_rows=nothing, mask=mask, scores=nothing.float())
    return TreeBuilder(tables, root, draft_to_target, frontier)


@dataclass(frozen=True)
class TreeBuilder:
    """A tree under construction. Levels are added in the order of shape.levels; then comes `plan`.

    tokens, scores, q: one entry a level, as given to `add`. rows: one entry a frontier, i64[B, w], the flat
    candidates that became rows.
    """

    tables: TreeTables
    root: Tensor
    draft_to_target: Tensor | None
    frontier: Frontier
    tokens: tuple[Tensor, ...] = ()
    scores: tuple[Tensor, ...] = ()
    rows: tuple[Tensor, ...] = ()
    q: tuple[Tensor, ...] = ()

    def add(self, tokens: Tensor, scores: Tensor | None = None, *, q: Tensor | None = None) -> TreeBuilder:
        """Adds the next level's candidates and moves the frontier on.

        tokens i64[B, w*k]: draft ids, -1 where missing. scores f32[B, w*k]: a dynamic tree needs them.
        q f32[B, w, Vd]: what the tokens were drawn from, for the sampled rule, which needs a fixed tree: to
        drop drawn children by their score would change the distribution. Raises UsageError then.
        """
        shape = self.tables.shape
        if shape.kind == "dynamic" and (q is not None or scores is None):
            raise UsageError(
                "a dynamic tree chooses children by score, which is not lossless for sampled children",
                hint="take a static tree or a chain, or the rule topk",
            )
        if scores is None:
            scores = torch.zeros_like(tokens, dtype=torch.float32)
        grown = replace(
            self,
            tokens=(*self.tokens, tokens),
            scores=(*self.scores, scores),
            q=self.q if q is None else (*self.q, q),
        )
        if len(grown.tokens) == len(shape.levels):
            return grown
        return grown._advance(tokens, scores)

    def _advance(self, tokens: Tensor, scores: Tensor) -> TreeBuilder:
        """Chooses the rows of the next level among the candidates of the last one."""
        done = len(self.tokens)
        last, level = self.tables.shape.levels[done - 1 : done + 1]
        select = self.tables.selects[done - 1]
        # [B, w]
        index = choose_frontier(scores, level.width) if select is None else select.expand(len(tokens), -1)
        parent_rows = index // last.children
        rows = self.tables.own_row.shape[0]
        seen = self.frontier.mask.gather(1, parent_rows.unsqueeze(-1).expand(-1, -1, rows))  # [B, w, R]
        frontier = Frontier(
            input_ids=self._to_target(tokens.gather(1, index)),
            parent_rows=parent_rows,
            mask=seen | self.tables.own_row[level.offset : level.offset + level.width],
            scores=scores.gather(1, index),
        )
        base = sum(tokens.shape[1] for tokens in self.tokens[:-1])
        return replace(self, frontier=frontier, rows=(*self.rows, index + base))

    def _to_target(self, tokens: Tensor) -> Tensor:
        """Draft ids -> target ids; a missing child gets some valid id, since graphs look it up."""
        tokens = tokens.clamp(min=0)
        return tokens if self.draft_to_target is None else self.draft_to_target[tokens]

    def plan(self) -> TreePlan:
        """The finished tree. Every level of the shape must have been added."""
        fixed, shape, batch = self.tables.fixed, self.tables.shape, self.root.shape[0]
        if fixed is None:
            chosen = rerank(torch.cat(self.scores, 1), shape.nodes - 1)  # [B, N-1]
            parents, depth, mask = self._connect(chosen)
        else:
            chosen = fixed.final.expand(batch, -1)
            parents = fixed.parents.expand(batch, -1)
            depth = fixed.depth.expand(batch, -1)
            mask = fixed.mask.expand(batch, -1, -1)
        drafted = torch.cat(self.tokens, 1).gather(1, chosen) if shape.levels else chosen  # [B, N-1]
        return TreePlan(
            shape=shape,
            tokens=torch.cat([self.root[:, None], self._to_target(drafted)], 1),
            parents=parents,
            depth=depth,
            mask=mask,
            alive=pad(drafted >= 0, (1, 0), value=True),
            sampled=self._sampled_rows(fixed) if fixed is not None and self.q else None,
        )

    def _connect(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """parents, depth and mask (as in TreePlan) of the chosen candidates i64[B, N-1]."""
        batch, nodes = chosen.shape[0], chosen.shape[1] + 1
        ids = torch.arange(nodes, device=chosen.device)
        # Slot 0 stands for the root, slot 1 + c for candidate c.
        slot_of_row = pad(torch.cat(self.rows, 1) + 1, (1, 0)) if self.rows else chosen.new_zeros(batch, 1)
        parent_slot = slot_of_row.gather(1, self.tables.candidate_row[chosen])  # [B, N-1]
        slots = 1 + self.tables.candidate_row.shape[0]
        node_of_slot = chosen.new_zeros(batch, slots).scatter(1, chosen + 1, ids[1:].expand(batch, -1))
        parents = pad(node_of_slot.gather(1, parent_slot), (1, 0), value=-1)  # [B, N]
        depth = pad(self.tables.candidate_depth[chosen], (1, 0))
        itself = ids[:, None] == ids  # [N, N]
        # One step up per level: a row sees itself and what its parent sees.
        up = parents.clamp(min=0).unsqueeze(-1).expand(-1, -1, nodes)
        mask = itself.expand(batch, -1, -1)
        for _ in range(self.tables.shape.depth):
            mask = mask.gather(1, up) | itself
        return parents, depth, mask

    def _sampled_rows(self, fixed: FixedTables) -> SampledRows:
        shape = self.tables.shape
        tokens = [
            pad(drawn.view(-1, level.width, level.children), (0, shape.top_k - level.children), value=-1)
            for drawn, level in zip(self.tokens, shape.levels, strict=True)
        ]
        q, drawn = torch.cat(self.q, 1), torch.cat(tokens, 1)
        return SampledRows(q, drawn, fixed.row_of_node, fixed.children, self.draft_to_target)
