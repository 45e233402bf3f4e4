"""The acceptance rules in exact rational arithmetic, and a toy pair of models to run the real ones on.

Slow and obvious on purpose: every outcome of every coin, with its probability. A model is a function from
the tokens after the root to a distribution, a list of Fractions over the vocabulary; a tree is a parent
table as in TreeShape.static.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

from eagle_run.decoding.acceptance import AcceptedPath, rejection_sampling, target_sampling
from eagle_run.decoding.drafting import TreePlan, TreeTables, expand, start
from eagle_run.decoding.sampling import SamplingTensors, sample_children
from eagle_run.decoding.tree import TreeShape

Dist = list[Fraction]
Tokens = tuple[int, ...]
Model = Callable[[Tokens], Dist]
Outcomes = dict[Tokens, Fraction]  # emitted tokens -> probability


def normalised(weights: Dist) -> Dist:
    return [w / sum(weights) for w in weights]


def draws(q: Dist, count: int) -> Iterator[tuple[Tokens, Fraction]]:
    """Every ordered draw of `count` tokens from q without replacement, and its odds; fewer if q has fewer."""
    if count == 0 or not any(q):
        yield (), Fraction(1)
        return
    for token, odds in enumerate(normalised(q)):
        if odds:
            rest = [Fraction(0) if i == token else w for i, w in enumerate(q)]
            for more, further in draws(rest, count - 1):
                yield (token, *more), odds * further


def trials(p: Dist, q: Dist, drawn: Tokens, *, renormalise: bool = True) -> tuple[list[Fraction], Dist]:
    """Acceptance odds of each drawn token once it is tried, and what is emitted from when none is accepted.

    `renormalise=False` is a bug on purpose: q keeps its values after a token was taken out.
    """
    accept = []
    for token in drawn:
        accept.append(min(Fraction(1), p[token] / q[token]))
        rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        p = normalised(rest) if any(rest) else p
        q = [Fraction(0) if i == token else w for i, w in enumerate(q)]
        q = normalised(q) if renormalise and any(q) else q
    return accept, p


def children_of(parents: Tokens, node: int) -> list[int]:
    return [child for child in range(1, len(parents)) if parents[child] == node]


def sampled_outcomes(target: Model, draft: Model, parents: Tokens, *, renormalise: bool = True) -> Outcomes:
    """The rule of `rejection_sampling`, over all draws of children, all acceptances and all last tokens."""
    outcomes: Outcomes = {}

    def visit(node: int, path: Tokens, reached: Fraction) -> None:
        kids = children_of(parents, node)
        for drawn, odds in draws(draft(path), len(kids)):
            accept, left = trials(target(path), draft(path), drawn, renormalise=renormalise)
            here = reached * odds
            for rank, token in enumerate(drawn):
                if accept[rank]:
                    visit(kids[rank], (*path, token), here * accept[rank])
                here *= 1 - accept[rank]
            for token, share in enumerate(left):
                emitted = (*path, token)
                outcomes[emitted] = outcomes.get(emitted, Fraction(0)) + here * share

    visit(0, (), Fraction(1))
    return outcomes


def followed_outcomes(target: Model, tree: set[Tokens]) -> Outcomes:
    """`target_sampling` on a tree given as the set of its paths, over all draws from the target."""
    outcomes: Outcomes = {}

    def visit(path: Tokens, reached: Fraction) -> None:
        for token, share in enumerate(target(path)):
            if (*path, token) in tree:
                visit((*path, token), reached * share)
            else:
                outcomes[(*path, token)] = reached * share

    visit((), Fraction(1))
    return outcomes


def completed(outcomes: Outcomes, target: Model, length: int) -> Outcomes:
    """Outcomes continued by plain draws from the target to `length` tokens: comparable with `joint`."""
    full: Outcomes = {}
    waiting = list(outcomes.items())
    while waiting:
        path, odds = waiting.pop()
        if len(path) == length:
            full[path] = full.get(path, Fraction(0)) + odds
        else:
            waiting += [((*path, token), odds * share) for token, share in enumerate(target(path))]
    return {path: odds for path, odds in full.items() if odds}


def joint(target: Model, length: int) -> Outcomes:
    """The target's own distribution over `length` tokens: what every rule must emit."""
    return completed({(): Fraction(1)}, target, length)


class Toy:
    """A target and a draft whose logits depend on the last token alone; the draft lacks one token."""

    def __init__(self, seed: int, vocab: int = 6, agreement: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(vocab, vocab, generator=generator) * 1.5
        self.target.fill_diagonal_(-3.0)  # or greedy decoding would soon repeat one token
        self.ids = torch.tensor([4, 1, 0, 5, 2])  # target token 3 can not be drafted
        noise = torch.randn(vocab, len(self.ids), generator=generator) * 1.5
        self.draft = agreement * self.target[:, self.ids] + (1 - agreement) * noise

    def grow(
        self, tables: TreeTables, root: Tensor, s: SamplingTensors, position: Tensor, *, sampled: bool
    ) -> TreePlan:
        grow = start(tables, root, self.ids)
        for level in tables.shape.levels:
            logits = self.draft[grow.frontier.input_ids]
            if sampled:
                tokens, q = sample_children(logits, level.children, s, position + level.depth)
                grow = grow.add(tokens, q=q)
            else:
                tokens, scores = expand(logits.log_softmax(-1), grow.frontier.scores, level.children)
                grow = grow.add(tokens, scores)
        return grow.plan()

    def round(
        self, tables: TreeTables, root: Tensor, s: SamplingTensors, position: Tensor, *, sampled: bool
    ) -> AcceptedPath:
        plan = self.grow(tables, root, s, position, sampled=sampled)
        rule = rejection_sampling if sampled else target_sampling
        return rule(plan, self.target[plan.tokens], s, position)


def decode(toy: Toy, shape: TreeShape, s: SamplingTensors, length: int, *, sampled: bool = False) -> Tensor:
    """Rounds until every slot has `length` tokens: i64[B, length]."""
    tables = TreeTables.build(shape)
    batch = s.seed.shape[0]
    root, position = torch.arange(batch) % 6, torch.arange(batch) % 5 + 10
    tokens: list[list[int]] = [[] for _ in range(batch)]
    while min(map(len, tokens)) < length:
        path = toy.round(tables, root, s, position, sampled=sampled)
        for slot, count in enumerate(path.length.tolist()):
            tokens[slot] += path.tokens[slot, :count].tolist()
        root, position = path.root, position + path.length
    return torch.tensor([line[:length] for line in tokens])
