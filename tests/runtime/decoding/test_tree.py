"""Trees against a slow reference that keeps paths in lists: growth, frontiers, plans, masks, bad shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_run.decoding.drafting import (
    TreeBuilder,
    TreePlan,
    TreeTables,
    choose_frontier,
    expand,
    rerank,
    start,
)
from eagle_run.decoding.sampling import sample_children, stack
from eagle_run.decoding.tree import TreeShape, best_static, parse_tree
from eagle_run.errors import UsageError
from eagle_run.params import SamplingParams

Path = tuple[int, ...]  # draft ids from the root's child down
LogQ = Callable[[Path], list[float]]

VOCAB = 12


def tied_draft(seed: int, step: float) -> LogQ:
    """A draft whose logq are distinct inside a row but whose sums tie all over the tree (step 0: all tie)."""

    def logq(path: Path) -> list[float]:
        order = list(range(VOCAB))
        random.Random(f"{seed}{path}").shuffle(order)
        return [-step * rank for rank in order]

    return logq


def smooth_draft(seed: int) -> LogQ:
    def logq(path: Path) -> list[float]:
        rng = random.Random(f"{seed}{path}")
        return torch.tensor([rng.gauss(0, 2) for _ in range(VOCAB)]).log_softmax(-1).tolist()

    return logq


def best_children(logq: list[float], k: int) -> list[int]:
    return torch.tensor(logq).topk(k).indices.tolist()


def slow_dynamic(logq: LogQ, shape: TreeShape) -> list[Path]:
    """Paths of the chosen nodes, in order: every candidate in one list, sorted by (score, place)."""
    scores: dict[Path, torch.Tensor] = {(): torch.tensor(0.0)}
    candidates: list[Path] = []
    frontier: list[Path] = [()]
    for _ in range(shape.depth):
        level = []
        for parent in frontier:
            row = logq(parent)
            for token in best_children(row, shape.top_k):
                child = (*parent, token)
                scores[child] = scores[parent] + torch.tensor(row[token])  # float32, as in the tree
                level.append(child)
        candidates += level
        frontier = sorted(level, key=lambda path: -scores[path].item())[: shape.top_k]  # sorted is stable
    best = sorted(candidates, key=lambda path: -scores[path].item())[: shape.nodes - 1]
    return [path for path in candidates if path in set(best)]


def slow_static(logq: LogQ, parents: tuple[int, ...]) -> list[Path]:
    paths: list[Path] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        rank = parents[1:node].count(parent)
        paths.append((*paths[parent], best_children(logq(paths[parent]), rank + 1)[rank]))
    return paths[1:]


def grow_tree(drafts: list[LogQ], shape: TreeShape, to_target: torch.Tensor | None) -> TreePlan:
    """Runs the real code over a batch of drafts, following only what a forward would see."""
    root = torch.arange(len(drafts)) + 5
    grow = start(TreeTables.build(shape), root, to_target)
    rows: list[list[Path]] = [[()] for _ in drafts]
    seen: list[list[Path]] = [[] for _ in drafts]  # all draft rows so far, in cache order
    for level in shape.levels:
        if level.depth > 1:
            rows = check_frontier(grow, level.offset, rows, seen, to_target)
        logq = torch.tensor(
            [[draft(path) for path in slot] for draft, slot in zip(drafts, rows, strict=True)]
        )
        assert logq.shape == (len(drafts), level.width, VOCAB)
        tokens, scores = expand(logq, grow.frontier.scores, level.children)
        grow = grow.add(tokens, scores)
    return grow.plan()


def check_frontier(
    grow: TreeBuilder,
    offset: int,
    rows: list[list[Path]],
    seen: list[list[Path]],
    to_target: torch.Tensor | None,
) -> list[list[Path]]:
    """Checks ids, hidden rows and mask of a frontier; returns the paths of its rows."""
    frontier = grow.frontier
    from_target = None if to_target is None else {t: d for d, t in enumerate(to_target.tolist())}
    following = []
    for slot, old in enumerate(rows):
        ids = frontier.input_ids[slot].tolist()
        drafted = ids if from_target is None else [from_target[i] for i in ids]
        new = [(*old[row], t) for row, t in zip(frontier.parent_rows[slot].tolist(), drafted, strict=True)]
        assert offset == len(seen[slot])
        seen[slot] += new
        for i, path in enumerate(new):
            visible = frontier.mask[slot, i].nonzero().flatten().tolist()
            assert visible == [j for j, other in enumerate(seen[slot]) if path[: len(other)] == other]
        following.append(new)
    return following


def check_plan(plan: TreePlan, slot: int, paths: list[Path], to_target: torch.Tensor | None) -> None:
    """The plan of one slot must be exactly these paths, with their parents, depths and ancestors."""
    nodes = [(), *paths]
    last = [path[-1] for path in paths]
    assert plan.tokens[slot].tolist() == [
        slot + 5,
        *(last if to_target is None else to_target[last].tolist()),
    ]
    assert plan.parents[slot].tolist() == [-1, *(nodes.index(path[:-1]) for path in paths)]
    assert all(parent < node for node, parent in enumerate(plan.parents[slot].tolist()))
    assert plan.depth[slot].tolist() == [len(path) for path in nodes]
    expected = [[path[: len(other)] == other for other in nodes] for path in nodes]
    assert plan.mask[slot].tolist() == expected
    assert plan.alive.all()


@st.composite
def dynamic_shapes(draw: st.DrawFn) -> TreeShape:
    depth, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    candidates = top_k + (depth - 1) * top_k**2
    return TreeShape.dynamic(depth, top_k, draw(st.integers(2, candidates + 1)))


@st.composite
def parent_tables(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(2, 10))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))


_drafts = st.lists(
    st.one_of(
        st.builds(smooth_draft, st.integers(0, 999)),
        st.builds(tied_draft, st.integers(0, 999), st.sampled_from([0.0, 0.25, 1.0])),
    ),
    min_size=1,
    max_size=3,
)
_maps = st.sampled_from([None, torch.arange(VOCAB).flip(0) * 3 + 1])


@given(shape=dynamic_shapes(), drafts=_drafts, to_target=_maps)
@settings(max_examples=120, deadline=None)
def test_dynamic_tree_equals_a_list_of_paths(
    shape: TreeShape, drafts: list[LogQ], to_target: torch.Tensor | None
) -> None:
    plan = grow_tree(drafts, shape, to_target)
    for slot, draft in enumerate(drafts):
        check_plan(plan, slot, slow_dynamic(draft, shape), to_target)


@given(parents=parent_tables(), drafts=_drafts, to_target=_maps)
@settings(max_examples=120, deadline=None)
def test_static_tree_equals_a_list_of_paths(
    parents: tuple[int, ...], drafts: list[LogQ], to_target: torch.Tensor | None
) -> None:
    plan = grow_tree(drafts, TreeShape.static(parents), to_target)
    assert plan.parents[0].tolist() == list(parents)
    for slot, draft in enumerate(drafts):
        check_plan(plan, slot, slow_static(draft, parents), to_target)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_chain_is_the_greedy_path(depth: int) -> None:
    draft = smooth_draft(3)
    plan = grow_tree([draft], TreeShape.chain(depth), None)
    path: Path = ()
    for _ in range(depth):
        path = (*path, best_children(draft(path), 1)[0])
    check_plan(plan, 0, [path[: i + 1] for i in range(depth)], None)
    dynamic = grow_tree([draft], TreeShape.dynamic(depth, 1, depth + 1), None)
    assert torch.equal(dynamic.tokens, plan.tokens)
    assert torch.equal(dynamic.mask, plan.mask)


def test_plain_is_the_root_alone() -> None:
    plan = grow_tree([smooth_draft(0), smooth_draft(1)], TreeShape.plain(), None)
    check_plan(plan, 0, [], None)
    check_plan(plan, 1, [], None)
    assert TreeShape.plain().levels == ()
    assert TreeShape.plain().cache_rows == 1


def test_a_child_never_outranks_its_parent() -> None:
    """A draft that is sure of one path: rounding must not put a child before its parent."""

    def sure(path: Path) -> list[float]:
        return [1e-9 if token == len(path) else -30.0 - token for token in range(VOCAB)]  # logq above 0

    for nodes in (2, 3, 5):
        plan = grow_tree([sure], TreeShape.dynamic(4, 3, nodes), None)
        check_plan(plan, 0, [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)][: nodes - 1], None)


def test_ties_go_to_the_shallower() -> None:
    scores = torch.full((2, 9), -1.0)
    scores[1, 4] = -0.5
    assert rerank(scores, 3).tolist() == [[0, 1, 2], [0, 1, 4]]
    assert choose_frontier(scores, 3).tolist() == [[0, 1, 2], [4, 0, 1]]
    plan = grow_tree([tied_draft(1, 0.0)], TreeShape.dynamic(3, 2, 7), None)
    assert plan.depth[0].tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert plan.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 2]


@given(parents=parent_tables(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_sampled_rows_belong_to_their_nodes(parents: tuple[int, ...], seed: int) -> None:
    """Each node's children are the first drawn of its own row, and that row's q was its own."""
    shape, slots = TreeShape.static(parents), 2
    table = (
        torch.randn(VOCAB + 9, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    )  # token -> logits
    s = stack([SamplingParams(temperature=0.7, seed=seed), SamplingParams(temperature=0)])
    to_target = torch.arange(VOCAB) + 4
    position = torch.tensor([50, 60])
    grow = start(TreeTables.build(shape), torch.tensor([1, 2]), to_target)
    for level in shape.levels:
        tokens, q = sample_children(table[grow.frontier.input_ids], level.children, s, position + level.depth)
        grow = grow.add(tokens, q=q)
    plan = grow.plan()
    sampled = plan.sampled
    assert sampled is not None
    temperature = torch.tensor([0.7, 1.0])
    for slot in range(slots):
        for node in range(shape.nodes):
            kids = [child for child in range(1, shape.nodes) if parents[child] == node]
            assert sampled.children[node].tolist() == kids + [-1] * (shape.top_k - len(kids))
            if kids:
                row = sampled.row_of_node[node]
                drawn = sampled.tokens[slot, row, : len(kids)]
                assert torch.equal(plan.tokens[slot, kids], drawn + 4)
                expected = (table[plan.tokens[slot, node]] / temperature[slot]).softmax(-1)
                torch.testing.assert_close(sampled.q[slot, row], expected)


def test_missing_children_are_dead_but_harmless_ids() -> None:
    grow = start(TreeTables.build(TreeShape.static((-1, 0, 0, 2))), torch.tensor([3]), torch.arange(4) + 7)
    q = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    grow = grow.add(torch.tensor([[0, -1]]), q=q)
    assert grow.frontier.input_ids.tolist() == [[7]]  # stands in for the missing child: some valid id
    plan = grow.add(torch.tensor([[2]]), q=q).plan()
    assert plan.tokens.tolist() == [[3, 7, 7, 9]]
    assert plan.alive.tolist() == [[True, True, False, True]]


def test_sampled_children_need_a_fixed_tree() -> None:
    grow = start(TreeTables.build(TreeShape.dynamic(2, 2, 4)), torch.tensor([0]))
    with pytest.raises(UsageError, match="lossless"):
        grow.add(torch.tensor([[0, 1]]), q=torch.full((1, 1, 4), 0.25))


def test_levels_say_what_is_forwarded() -> None:
    dynamic = TreeShape.dynamic(3, 4, 10)
    assert [(v.width, v.children, v.offset, v.select) for v in dynamic.levels] == [
        (1, 4, 0, None),
        (4, 4, 0, None),
        (4, 4, 4, None),
    ]
    assert (dynamic.draft_rows, dynamic.cache_rows, dynamic.final) == (8, 10, None)
    # Only nodes with children are forwarded: 1 and 3 of the first level, then 5.
    static = TreeShape.static((-1, 0, 0, 0, 1, 3, 3, 5))
    assert [(v.width, v.children, v.offset, v.select) for v in static.levels] == [
        (1, 3, 0, (0, 2)),
        (2, 2, 0, (2,)),
        (1, 1, 2, ()),
    ]
    assert static.final == (0, 1, 2, 3, 5, 6, 7)
    assert static.row_of_node == (0, 1, 0, 2, 0, 3, 0, 0)
    assert (static.depth, static.top_k, static.nodes, static.draft_rows) == (3, 3, 8, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TreeShape.dynamic(0, 2, 3),
        lambda: TreeShape.dynamic(2, 0, 3),
        lambda: TreeShape.dynamic(2, 2, 1),
        lambda: TreeShape.dynamic(2, 2, 8),  # 6 candidates and the root
        lambda: TreeShape.dynamic(-1, 2, 3),
        lambda: TreeShape.dynamic(2.0, 2, 3),  # type: ignore[arg-type]
        lambda: TreeShape.dynamic(True, 2, 3),
        lambda: TreeShape.chain(0),
        lambda: TreeShape.static(()),
        lambda: TreeShape.static((-1,)),
        lambda: TreeShape.static((0, 0)),
        lambda: TreeShape.static((-1, 1)),
        lambda: TreeShape.static((-1, 0, 3, 0)),
        lambda: TreeShape.static((-1, -1)),
        lambda: TreeShape.static((-1, 0.0)),  # type: ignore[arg-type]
        lambda: parse_tree("bush", 2, 2, 4),
        lambda: parse_tree("dynamic", 2, 2),
        lambda: parse_tree("dynamic", 2, 2, 4, (-1, 0)),
        lambda: parse_tree("static", 2),
        lambda: parse_tree("static", 3, parents=(-1, 0, 0)),
        lambda: parse_tree("chain", 4, nodes=7),
        lambda: parse_tree("plain", depth=2),
        lambda: best_static(2, 2, 8),
        lambda: best_static(0, 2, 3),
        lambda: best_static(2, 2, 4, (0.2, 0.5)),
        lambda: best_static(2, 2, 4, (0.2, 0.0)),
        lambda: best_static(2, 2, 4, ()),
    ],
)
def test_shapes_that_make_no_sense_are_usage_errors(make: Callable[[], TreeShape]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "shape",
    [TreeShape.dynamic(3, 2, 6), TreeShape.static((-1, 0, 0, 1)), TreeShape.chain(4), TreeShape.plain()],
)
def test_shapes_round_trip_and_are_keys(shape: TreeShape) -> None:
    again = parse_tree(**shape.as_dict())  # type: ignore[arg-type]
    assert again == shape
    assert {shape: 1}[again] == 1
    assert again.levels == shape.levels


@given(
    depth=st.integers(1, 4),
    top_k=st.integers(1, 4),
    share=st.floats(0, 1),
    ranks=st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(lambda r: tuple(sorted(r, reverse=True))),
)
@settings(max_examples=60, deadline=None)
def test_best_static_takes_the_most_valuable_nodes(
    depth: int, top_k: int, share: float, ranks: tuple[float, ...]
) -> None:
    everything: list[tuple[float, Path]] = []  # all paths of ranks, by brute force
    layer: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(depth):
        layer = [(value * ranks[r], (*path, r)) for value, path in layer for r in range(top_k)]
        everything += layer
    nodes = 2 + int(share * (len(everything) - 1))
    shape = best_static(depth, top_k, nodes, ranks)
    paths: list[Path] = [()]
    values = []
    for node, parent in enumerate(shape.table[1:], start=1):  # type: ignore[index]
        paths.append((*paths[parent], shape.table[1:node].count(parent)))  # type: ignore[index]
        values.append(torch.tensor([ranks[r] for r in paths[-1]], dtype=torch.float64).prod().item())
    assert shape.nodes == nodes
    best = sorted((value for value, _ in everything), reverse=True)[: nodes - 1]
    assert sorted(values, reverse=True) == pytest.approx(best)
    assert all(len(a) <= len(b) for a, b in pairwise(paths))


def test_default_static_tree_is_deeper_where_the_draft_is_surer() -> None:
    shape = best_static(4, 4, 9)
    assert shape.nodes == 9
    assert shape.depth == 4  # 0.6^4 beats a third child of the root
    assert shape.top_k >= 2


@pytest.mark.parametrize(
    "shape", [TreeShape.dynamic(3, 3, 8), TreeShape.static((-1, 0, 0, 1, 1, 4)), TreeShape.plain()]
)
def test_nothing_reads_the_host(shape: TreeShape) -> None:
    with FakeTensorMode():
        grow = start(TreeTables.build(shape), torch.zeros(2, dtype=torch.int64), torch.arange(VOCAB))
        for level in shape.levels:
            logq = torch.randn(2, level.width, VOCAB).log_softmax(-1)
            tokens, scores = expand(logq, grow.frontier.scores, level.children)
            grow = grow.add(tokens, scores)
        plan = grow.plan()
    assert plan.tokens.shape == plan.parents.shape == plan.depth.shape == plan.alive.shape == (2, shape.nodes)
    assert plan.mask.shape == (2, shape.nodes, shape.nodes)
