"""The acceptance rules in exact rational arithmetic: every outcome of every coin, with its probability.

Slow and obvious on purpose. A model is a function from the tokens after the root to a distribution, a list of
Fractions over the vocabulary; a tree is a parent table as in TreeShape.static.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

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
    """The rule of `walk_sampled`, over all draws of children, all acceptances and all last tokens."""
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
    """The rule of `walk` on a tree given as the set of its paths, over all draws from the target."""
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
