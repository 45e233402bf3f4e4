"""Both acceptance rules emit exactly p: by enumeration, and the tensor code decides as the enumerated rule.

Chain of evidence: the rules, in fractions, emit the target's distribution (no samples); the tensor code
takes the same decision as the fractions for coins on a grid; with real coins, counts over many slots pass
chi-square.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from support.reference import (
    Dist,
    Model,
    Tokens,
    Toy,
    completed,
    decode,
    draws,
    followed_outcomes,
    joint,
    normalised,
    sampled_outcomes,
    trials,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_run.decoding import acceptance as accept
from eagle_run.decoding.acceptance import AcceptedPath, rejection_sampling, target_sampling
from eagle_run.decoding.drafting import TreePlan, TreeTables, start
from eagle_run.decoding.rng import TOKEN, uniform
from eagle_run.decoding.sampling import (
    SamplingParams,
    distribution,
    draft_distribution,
    draw,
    stack,
    to_weights,
)
from eagle_run.decoding.tree import TreeShape

_ALMOST_ONE = 1 - 2.0**-53
_TREES: list[Tokens] = [(-1, 0), (-1, 0, 0), (-1, 0, 1), (-1, 0, 0, 1, 1), (-1, 0, 0, 0, 2)]


# --- the rules themselves, in fractions ---------------------------------------------------------------------


def random_model(rng: random.Random, vocab: int, zeros: float) -> Model:
    """A table of distributions with small denominators, some of its entries zero."""
    table: dict[Tokens, Dist] = {}

    def model(path: Tokens) -> Dist:
        if path not in table:
            weights = [Fraction(0 if rng.random() < zeros else rng.randint(1, 9)) for _ in range(vocab)]
            weights[rng.randrange(vocab)] += 1
            table[path] = normalised(weights)
        return table[path]

    return model


@pytest.mark.parametrize("parents", _TREES)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_sampled_rule_emits_exactly_p(parents: Tokens, zeros: float) -> None:
    rng = random.Random(f"{parents}{zeros}")
    for _ in range(6):
        target, draft = random_model(rng, 4, zeros), random_model(rng, 4, zeros)
        assert completed(sampled_outcomes(target, draft, parents), target, 3) == joint(target, 3)


def test_sampled_rule_is_exact_for_equal_and_for_disjoint_models() -> None:
    rng = random.Random(1)
    target = random_model(rng, 4, 0.3)
    assert completed(sampled_outcomes(target, target, (-1, 0, 0)), target, 2) == joint(target, 2)
    half = Fraction(1, 2)
    left, right = (lambda _: [half, half, 0, 0]), (lambda _: [0, 0, half, half])
    assert completed(sampled_outcomes(left, right, (-1, 0, 0, 0)), left, 2) == joint(left, 2)


def test_enumeration_finds_a_q_that_is_not_renormalised() -> None:
    """The check above has teeth: the usual bug of this rule is seen by it."""
    rng = random.Random(2)
    target, draft = random_model(rng, 4, 0.0), random_model(rng, 4, 0.0)
    wrong = sampled_outcomes(target, draft, (-1, 0, 0), renormalise=False)
    assert completed(wrong, target, 2) != joint(target, 2)


@pytest.mark.parametrize("tree", [set(), {(0,)}, {(1,), (3,)}, {(0,), (2,), (0, 1), (0, 3), (2, 2)}])
def test_following_the_target_emits_exactly_p(tree: set[Tokens]) -> None:
    rng = random.Random(3)
    for zeros in (0.0, 0.4):
        target = random_model(rng, 4, zeros)
        assert completed(followed_outcomes(target, tree), target, 3) == joint(target, 3)


# --- the tensor code against the fractions, coin by coin ----------------------------------------------------


def fix_coins(monkeypatch: pytest.MonkeyPatch, last: Tensor, tries: Tensor, root: int) -> None:
    """Replaces the coins of `accept`: slot b (its seed) at depth d gets last[b, d] and tries[b, d, rank]."""

    def coins(seed: Tensor, position: Tensor, stream: int, rank: Tensor | None = None) -> Tensor:
        depth = position - root - 1
        return last[seed, depth] if rank is None else tries[seed, depth, rank]

    monkeypatch.setattr(accept, "uniform", coins)


def exact(p: Tensor) -> Dist:
    """A row of probabilities as the fractions that the tensor code draws from."""
    return normalised([Fraction(w) for w in to_weights(p).tolist()])


def token_at(dist: Dist, u: float) -> int:
    run = Fraction(0)
    for token, share in enumerate(dist):
        run += share
        if run > Fraction(u):
            return token
    raise AssertionError("coin beyond the last token")


_GRID = [0.0, *((2 * i + 1) / 64 for i in range(0, 32, 3)), _ALMOST_ONE]


def node_case(seed: int, ids: Tensor, vocab: int) -> tuple[Tensor, Dist, list[Tokens], Tensor]:
    """A q f32[Vd] of whole 64ths, the same over the target's tokens, all draws of two, logits f32[V]."""
    rng = random.Random(seed)
    q = [rng.choice([0, 3, 8, 13, 21]) for _ in ids]
    q[:2] = [q[0] + 1, q[1] + 2]
    over_target = [Fraction(0)] * vocab
    for i, token in enumerate(ids.tolist()):
        over_target[token] = Fraction(q[i], sum(q))
    logits = torch.tensor([rng.gauss(0, 1.5) for _ in range(vocab)])
    logits[rng.randrange(vocab)] = -torch.inf  # p = 0 somewhere, often at a drawn token
    orders = [drawn for drawn, _ in draws([Fraction(w) for w in q], 2)]
    return torch.tensor([w / 64 for w in q]), over_target, orders, logits


@pytest.mark.parametrize("ids", [torch.arange(5), torch.tensor([3, 0, 4])])
def test_one_node_decides_as_the_fractions_do(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drawn children, every order of drawing them, coins on a grid with both ends."""
    one, grid = SamplingParams(temperature=1.0), torch.tensor(_GRID, dtype=torch.float64)
    accepted: list[int] = []
    for seed in range(6):
        q, q_target, orders, logits = node_case(seed, ids, vocab=5)
        cells = [range(len(orders)), *(range(len(_GRID)),) * 3]
        index = torch.cartesian_prod(*(torch.tensor(cell) for cell in cells))  # [slots, 4]
        slots = len(index)
        grow = start(
            TreeTables.build(TreeShape.static((-1, 0, 0))),
            torch.zeros(slots, dtype=torch.int64),
            None if len(ids) == 5 else ids,
        )
        plan = grow.add(torch.tensor(orders)[index[:, 0]], q=q.expand(slots, 1, -1)).plan()
        tries, last = grid[index[:, 1:3]], grid[index[:, 3]]
        fix_coins(monkeypatch, last[:, None].expand(-1, 2), tries[:, None].expand(-1, 2, -1), root=50)
        s = stack([replace(one, seed=slot) for slot in range(slots)])
        path = rejection_sampling(plan, logits.expand(slots, 3, -1), s, torch.full((slots,), 50))

        p = exact(distribution(logits[None], stack([one]))[0])
        expected = []
        for drawn in orders:
            tokens = tuple(ids[list(drawn)].tolist())
            odds, left = trials(p, q_target, tokens)
            for first, second, final in product(_GRID, repeat=3):
                if Fraction(first) < odds[0]:
                    expected.append((1, tokens[0]))
                elif Fraction(second) < odds[1]:
                    expected.append((2, tokens[1]))
                else:
                    expected.append((0, token_at(left, final)))
        node = path.nodes[:, 1]
        assert list(zip(node.tolist(), path.tokens[:, 0].tolist(), strict=True)) == expected
        assert torch.equal(path.length, 1 + (node > 0))
        accepted += [node for node, _ in expected]
    assert min(accepted.count(node) for node in range(3)) > 100  # all three ends were compared


@pytest.mark.parametrize("coin", [0.0, 0.5, _ALMOST_ONE])
def test_a_token_of_probability_zero_is_never_emitted(coin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`r <= p` would accept p = 0 at coin 0; so would a 0/0 where p and q are the same."""
    logits, s = (
        torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf]),
        stack([SamplingParams(temperature=1.0)]),
    )
    fix_coins(monkeypatch, *(torch.full(size, coin, dtype=torch.float64) for size in ((1, 2), (1, 2, 3))), 0)
    for q in ([0.5, 0.25, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.25, 0.25]):
        tables = TreeTables.build(TreeShape.static((-1, 0, 0, 0)))
        for drawn in ([0, 1, 2], [2, 0, 1], [1, -1, -1], [0, 2, 3]):
            tokens = torch.tensor([[t if t >= 0 and q[t] > 0 else -1 for t in drawn]])
            order = (tokens < 0).long().argsort(stable=True)  # missing children come last
            plan = start(tables, torch.tensor([0])).add(tokens.gather(1, order), q=torch.tensor([[q]])).plan()
            path = rejection_sampling(plan, logits.expand(1, 4, -1), s, torch.tensor([0]))
            assert path.tokens[0, 0] == 1


def test_rounding_where_p_equals_q_leaves_something_to_draw() -> None:
    """The largest coin may reject by rounding when p and q are the same: then nothing is left of p - q."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(1, 2**30, (5000, 3), generator=generator).double() * torch.tensor([0.0, 1.0, 1.0])
    scale = torch.randint(1, 99, (5000, 2), generator=generator).double()
    p, q = w * scale[:, :1] * 2.0**14, w * scale[:, 1:] * 2.0**-40  # proportional, so equal once normalised
    drawn, coins = torch.tensor([[1, 2]]).expand(5000, -1), torch.full((5000, 2), _ALMOST_ONE)
    nothing = torch.zeros(5000, 1, dtype=torch.int64)
    for tries in (1, 2):
        rank, left = accept._reject(p, nothing, q, drawn[:, :tries], coins[:, :tries].double())
        assert (rank != 0).any()  # it does happen
        assert (left.sum(1) > 2**12).all()
        assert not left[:, 0].any()  # and where p = 0 nothing has come up


# --- whole walks over many slots, with real coins -----------------------------------------------------------


def pvalue(counts: Tensor, p: Tensor) -> float:
    """Chi-square of counts against p; the p-value is 0 when something of probability 0 was counted."""
    kept = p > 0
    if counts[~kept].sum() > 0:
        return 0.0
    expected = p[kept].double() * counts.sum()
    return float(chi2.sf(((counts[kept] - expected) ** 2 / expected).sum().item(), int(kept.sum()) - 1))


_SHAPES = [TreeShape.chain(2), TreeShape.static((-1, 0, 0, 0, 1, 1, 2)), TreeShape.static((-1, 0, 0, 1, 3))]


@pytest.mark.parametrize(
    ("shape", "sampled"),
    [*((shape, rule) for shape in _SHAPES for rule in (False, True)), (TreeShape.dynamic(3, 3, 8), False)],
)
@pytest.mark.parametrize(
    "one", [SamplingParams(temperature=0.8), SamplingParams(temperature=1.2, top_k=4, top_p=0.93)]
)
def test_emitted_tokens_follow_p(shape: TreeShape, sampled: bool, one: SamplingParams) -> None:
    toy, slots = Toy(8, agreement=0.5), 40_000
    s = replace(stack([one] * slots), seed=torch.arange(slots))
    root, position = torch.full((slots,), 2), torch.full((slots,), 31)
    path = toy.round(TreeTables.build(shape), root, s, position, sampled=sampled)
    p = distribution(toy.target, stack([one] * len(toy.target)))  # [last token, next token]
    before = torch.cat([root[:, None], path.tokens], 1)
    values = []  # one a node and token before: whatever was accepted up to there, p follows
    for place, node, last in product(range(shape.depth + 1), range(shape.nodes), range(len(p))):
        here = (path.length > place) & (path.nodes[:, place] == node) & (before[:, place] == last)
        if here.sum() > 300:
            values.append(pvalue(torch.bincount(path.tokens[here, place], minlength=len(p)), p[last]))
    if sampled:
        assert path.nodes.unique().tolist() == list(range(shape.nodes))  # no node was left out
    assert len(values) >= shape.depth + 1
    assert min(values) > 1e-3 / len(values)


def test_chi_square_sees_a_wrong_q() -> None:
    """The check above has teeth: accepting against another q than the children were drawn from fails it."""
    toy, slots = Toy(8, agreement=0.5), 40_000
    s = replace(stack([SamplingParams(temperature=0.8)] * slots), seed=torch.arange(slots))
    root, position = torch.full((slots,), 2), torch.full((slots,), 31)
    plan = toy.grow(TreeTables.build(_SHAPES[1]), root, s, position, sampled=True)
    assert plan.sampled is not None
    plan.sampled.q.copy_(plan.sampled.q.sqrt())  # as if another temperature had been used
    path = rejection_sampling(plan, toy.target[plan.tokens], s, position)
    p = distribution(toy.target[2:3], stack([SamplingParams(temperature=0.8)]))[0]
    assert pvalue(torch.bincount(path.tokens[:, 0], minlength=6), p) < 1e-9


_MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=3, seed=2),
    SamplingParams(temperature=1.5, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.2, seed=4),
    SamplingParams(temperature=0.0, top_k=2, seed=5),
]


@pytest.mark.parametrize("shape", [*_SHAPES, TreeShape.dynamic(3, 3, 7), TreeShape.dynamic(1, 4, 3)])
def test_a_seed_gives_the_tokens_of_plain_decoding(shape: TreeShape) -> None:
    toy, s = Toy(11), stack(_MIXED)
    plain = decode(toy, TreeShape.plain(), s, 24)
    assert torch.equal(decode(toy, shape, s, 24), plain)
    for line in plain:
        assert len(line.unique()) > 1  # not a constant, which anything would reproduce
    assert torch.equal(decode(toy, TreeShape.plain(), s, 24, sampled=True), plain)


@pytest.mark.parametrize("shape", _SHAPES)
def test_greedy_slots_of_a_sampled_batch_are_greedy(shape: TreeShape) -> None:
    toy = Toy(13)
    plain = decode(toy, TreeShape.plain(), stack(_MIXED), 24)
    sampled = decode(toy, shape, stack(_MIXED), 24, sampled=True)
    assert torch.equal(sampled[[0, 5]], plain[[0, 5]])
    greedy = [SamplingParams(temperature=0)] * 6
    assert torch.equal(
        decode(toy, shape, stack(greedy), 24, sampled=True), decode(toy, shape, stack(greedy), 24)
    )


def test_a_slot_of_a_batch_is_what_it_is_alone() -> None:
    toy, tables = Toy(17), TreeTables.build(_SHAPES[1])
    root, position = torch.arange(6), torch.arange(6) + 40
    for sampled in (False, True):
        together = toy.round(tables, root, stack(_MIXED), position, sampled=sampled)
        for slot, one in enumerate(_MIXED):
            here = slice(slot, slot + 1)
            alone = toy.round(tables, root[here], stack([one]), position[here], sampled=sampled)
            assert torch.equal(alone.nodes[0], together.nodes[slot])
            count = int(alone.length)
            assert torch.equal(alone.tokens[0, :count], together.tokens[slot, :count])


# --- paths --------------------------------------------------------------------------------------------------


@st.composite
def plans(make: st.DrawFn) -> TreePlan:
    """Any tree of up to 9 nodes over 4 tokens; siblings differ; some nodes may not exist."""
    nodes, parents, tokens = make(st.integers(2, 9)), [-1], [0]
    for node in range(1, nodes):
        free = [
            (parent, token)
            for parent in range(node)
            for token in range(4)
            if (parent, token) not in zip(parents, tokens, strict=True)
        ]
        parent, token = make(st.sampled_from(free))
        parents.append(parent)
        tokens.append(token)
    shape = TreeShape.static(tuple(parents))
    depth = [0] * nodes
    for node in range(1, nodes):
        depth[node] = depth[parents[node]] + 1
    alive = [True, *(make(st.booleans()) or make(st.booleans()) for _ in range(nodes - 1))]
    return TreePlan(
        shape=shape,
        tokens=torch.tensor([tokens]),
        parents=torch.tensor([parents]),
        depth=torch.tensor([depth]),
        mask=torch.zeros(1, nodes, nodes, dtype=torch.bool),
        alive=torch.tensor([alive]),
    )


@given(plan=plans(), seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 1.0]))
@settings(max_examples=150, deadline=None)
def test_walk_equals_a_loop(plan: TreePlan, seed: int, temperature: float) -> None:
    nodes = plan.tokens.shape[1]
    logits = torch.randn(1, nodes, 4, generator=torch.Generator().manual_seed(seed)) * 2
    s = stack([SamplingParams(temperature=temperature, seed=seed)])
    node, expected_nodes, expected_tokens = 0, [0], []
    while True:
        coin = uniform(s.seed, 90 + len(expected_nodes), TOKEN)
        token = int(draw(distribution(logits[:, node], s), coin))
        expected_tokens.append(token)
        hits = [
            child
            for child in range(1, nodes)
            if plan.parents[0, child] == node and plan.tokens[0, child] == token and plan.alive[0, child]
        ]
        if not hits:
            break
        node = hits[0]
        expected_nodes.append(node)
    path = target_sampling(plan, logits, s, torch.tensor([90]))
    length = len(expected_nodes)
    assert path.length.tolist() == [length]
    padding = [expected_nodes[-1]] * (plan.shape.depth + 1 - length)
    assert path.nodes.tolist() == [expected_nodes + padding]
    assert path.tokens[0, :length].tolist() == expected_tokens
    assert path.root.tolist() == [expected_tokens[-1]]


def test_sampled_rule_refuses_a_plan_without_q() -> None:
    plan = start(TreeTables.build(TreeShape.chain(1)), torch.tensor([0])).add(torch.tensor([[1]])).plan()
    with pytest.raises(ValueError, match="with q"):
        rejection_sampling(
            plan, torch.zeros(1, 2, 4), stack([SamplingParams(temperature=1.0)]), torch.tensor([0])
        )


def test_children_are_drawn_from_the_q_that_judges_them() -> None:
    toy, s = Toy(19), stack([SamplingParams(temperature=0.6, seed=8)])
    plan = toy.grow(
        TreeTables.build(TreeShape.chain(1)), torch.tensor([2]), s, torch.tensor([5]), sampled=True
    )
    assert plan.sampled is not None
    assert torch.equal(plan.sampled.q, draft_distribution(toy.draft[torch.tensor([[2]])], s))


_RULES: list[tuple[Callable[..., AcceptedPath], bool]] = [
    (target_sampling, False),
    (rejection_sampling, True),
]


@pytest.mark.parametrize(("rule", "sampled"), _RULES)
@pytest.mark.parametrize("shape", [_SHAPES[1], TreeShape.plain()])
@pytest.mark.parametrize("mix", [_MIXED, [SamplingParams(temperature=0)] * 2])
def test_nothing_reads_the_host(
    rule: Callable[..., AcceptedPath], sampled: bool, shape: TreeShape, mix: list[SamplingParams]
) -> None:
    with FakeTensorMode():
        toy, s, batch = Toy(0), stack(mix), len(mix)
        root = torch.zeros(batch, dtype=torch.int64)
        plan = toy.grow(TreeTables.build(shape), root, s, root, sampled=sampled)
        path = rule(plan, toy.target[plan.tokens], s, root)
        next_root = path.root
    assert path.nodes.shape == path.tokens.shape == (batch, shape.depth + 1)
    assert path.length.shape == next_root.shape == (batch,)
