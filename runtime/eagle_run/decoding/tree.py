"""The shape of a draft tree, before any token is known: levels, parents, rows. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from eagle_run.errors import UsageError

# How often the child of rank 0, 1, ... was the accepted one, for a head in the range of the EAGLE papers.
RANK_ACCEPTANCE = (0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008, 0.006)


@dataclass(frozen=True)
class Level:
    """One forward of the draft (for level 1 the primed pair's) and the children that it gives.

    depth: of the children. width: rows forwarded. children: per row. offset: place of the first row among
    the R draft rows. select: flat places, within this level's width * children candidates, of the next
    frontier; None means the best by score.
    """

    depth: int
    width: int
    children: int
    offset: int
    select: tuple[int, ...] | None


@dataclass(frozen=True)
class TreeShape:
    """What a tree is before any token is known. Hashable; make it with a constructor or `parse_tree`.

    kind: "dynamic", "static", "chain" or "plain". depth: longest drafted path. top_k: most children of a
    node. nodes: verified nodes, the root included. parents: for "static" only, the parent of each node (-1
    for the root); parents come before children, and siblings take ranks 0, 1, ... in order of appearance.
    """

    kind: str
    depth: int
    top_k: int
    nodes: int
    parents: tuple[int, ...] | None = None

    @classmethod
    def dynamic(cls, depth: int, top_k: int, nodes: int) -> TreeShape:
        """top_k children for each of a level's top_k best nodes; the best nodes - 1 of all are verified."""
        for name, value, least in (("depth", depth, 1), ("top_k", top_k, 1), ("nodes", nodes, 2)):
            _whole(name, value, least)
        candidates = top_k + (depth - 1) * top_k**2
        if nodes - 1 > candidates:
            raise UsageError(
                f"a tree of {nodes} nodes (root included) needs {nodes - 1} candidates, but depth {depth} "
                f"with top_k {top_k} gives {candidates}",
                hint=f"ask for at most {candidates + 1} nodes, or for more depth or top_k",
            )
        return cls("dynamic", depth, top_k, nodes)

    @classmethod
    def static(cls, parents: tuple[int, ...]) -> TreeShape:
        """A fixed table, e.g. (-1, 0, 0, 1): the root has two children and one grandchild."""
        parents = tuple(parents)
        if len(parents) < 2 or parents[0] != -1:
            raise UsageError(
                f"a static tree's parents should be -1 (the root) and at least one more, found {parents}",
                hint="for a tree without drafts ask for the kind plain",
            )
        depths = [0]
        for node, parent in enumerate(parents[1:], start=1):
            if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < node:
                raise UsageError(
                    f"the parent of node {node} should be an earlier one (0 to {node - 1}), found {parent!r}",
                    hint="list the nodes so that parents come before their children",
                )
            depths.append(depths[parent] + 1)
        return cls("static", max(depths), max(map(parents.count, parents[1:])), len(parents), parents)

    @classmethod
    def chain(cls, depth: int) -> TreeShape:
        """One child a node: classic speculative decoding."""
        _whole("depth", depth, 1)
        return cls("chain", depth, 1, depth + 1)

    @classmethod
    def plain(cls) -> TreeShape:
        """No draft: plain autoregressive decoding."""
        return cls("plain", 0, 0, 1)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The draft's levels, from the root's children down; none for plain decoding."""
        k = self.top_k
        if self.kind != "dynamic":
            return self._layout[0]
        first = Level(depth=1, width=1, children=k, offset=0, select=None)
        return (first, *(Level(d, k, k, (d - 2) * k, None) for d in range(2, self.depth + 1)))

    @property
    def final(self) -> tuple[int, ...] | None:
        """Flat candidate of each node after the root; None for a dynamic tree: the best by score."""
        return None if self.kind == "dynamic" else self._layout[1]

    @property
    def draft_rows(self) -> int:
        """R: rows that the tree takes in the draft's cache, behind the accepted pairs."""
        return sum(level.width for level in self.levels[1:])

    @property
    def cache_rows(self) -> int:
        """Rows behind the accepted tokens that one round may write in either cache."""
        return max(self.nodes, self.draft_rows, self.depth + 1)

    @property
    def table(self) -> tuple[int, ...] | None:
        """Parents of every kind of fixed tree; None for a dynamic one."""
        if self.kind in ("chain", "plain"):
            return tuple(range(-1, self.depth))
        return self.parents

    @property
    def row_of_node(self) -> tuple[int, ...]:
        """Fixed trees: the draft row that gave a node's children (0 for a leaf, which has none)."""
        return self._layout[2]

    @cached_property
    def _layout(self) -> tuple[tuple[Level, ...], tuple[int, ...], tuple[int, ...]]:
        """Levels, final and row_of_node of a fixed tree: only nodes with children are forwarded."""
        children = children_of(self.table or ())
        levels: list[Level] = []
        place, row_of = [0] * self.nodes, [0] * self.nodes
        rows, base, offset = ([0] if children[0] else []), 0, 0
        while rows:
            k = max(len(children[row]) for row in rows)
            flat = {n: i * k + rank for i, row in enumerate(rows) for rank, n in enumerate(children[row])}
            for i, row in enumerate(rows):
                row_of[row] = offset + i + (1 if levels else 0)
            for node, index in flat.items():
                place[node] = base + index
            following = [node for node in flat if children[node]]
            levels.append(Level(len(levels) + 1, len(rows), k, offset, tuple(flat[n] for n in following)))
            base += len(rows) * k
            offset += len(rows) if len(levels) > 1 else 0
            rows = following
        return tuple(levels), tuple(place[1:]), tuple(row_of)

    def as_dict(self) -> dict[str, object]:
        """kind, depth, top_k, nodes, parents: the arguments of `parse_tree`, for manifests and reports."""
        parents = None if self.parents is None else list(self.parents)
        return {
            "kind": self.kind,
            "depth": self.depth,
            "top_k": self.top_k,
            "nodes": self.nodes,
            "parents": parents,
        }


def parse_tree(
    kind: str,
    depth: int | None = None,
    top_k: int | None = None,
    nodes: int | None = None,
    parents: tuple[int, ...] | list[int] | None = None,
) -> TreeShape:
    """A shape from the values of a command line or manifest.

    Raises UsageError for an unknown kind, a missing value, and one that contradicts the kind or the parents.
    """
    needs = {"dynamic": ("depth", "top_k", "nodes"), "static": ("parents",), "chain": ("depth",), "plain": ()}
    given: dict[str, Any] = {"depth": depth, "top_k": top_k, "nodes": nodes, "parents": parents}
    if kind not in needs:
        raise UsageError(f"the kind of tree should be one of {', '.join(needs)}, found {kind!r}")
    missing = [name for name in needs[kind] if given[name] is None]
    if missing:
        raise UsageError(f"a {kind} tree needs {', '.join(missing)}", hint=f"give {' and '.join(missing)}")
    if parents is not None:
        given["parents"] = tuple(parents)
    shape: TreeShape = getattr(TreeShape, kind)(*(given[name] for name in needs[kind]))
    for name, value in given.items():
        if value is not None and value != getattr(shape, name):
            raise UsageError(
                f"this {kind} tree has {name} {getattr(shape, name)}, but {value} was given",
                hint=f"leave out {name}, or choose another kind of tree",
            )
    return shape


def best_static(
    depth: int, top_k: int, nodes: int, rank_acceptance: tuple[float, ...] = RANK_ACCEPTANCE
) -> TreeShape:
    """The fixed tree with the most expected accepted drafts, from the acceptance of each rank (Sequoia §3).

    A node's value is the product of the acceptances along its path; the nodes - 1 most valuable are taken,
    ties to the shallower. rank_acceptance must not rise. Raises UsageError where `dynamic` would, or when
    depth and top_k (or the ranks given) leave no room for that many nodes.
    """
    TreeShape.dynamic(depth, top_k, 2)
    _whole("nodes", nodes, 2)
    ranks = rank_acceptance[:top_k]
    if not ranks or any(not 0 < a <= 1 for a in ranks) or any(a < b for a, b in pairwise(ranks)):
        raise UsageError(f"rank acceptances should lie in (0, 1] and not rise, found {rank_acceptance}")
    waiting: list[tuple[float, int, tuple[int, ...]]] = []  # a heap of (-value, depth, path of ranks)

    def offer(path: tuple[int, ...]) -> None:
        if len(path) <= depth and path[-1] < len(ranks):
            heappush(waiting, (-math.prod(ranks[rank] for rank in path), len(path), path))

    paths: list[tuple[int, ...]] = []
    offer((0,))
    while waiting and len(paths) < nodes - 1:
        path = heappop(waiting)[2]
        paths.append(path)
        offer((*path, 0))
        offer((*path[:-1], path[-1] + 1))
    if len(paths) < nodes - 1:
        raise UsageError(
            f"a tree of depth {depth} and top_k {len(ranks)} has at most {len(paths) + 1} nodes, not {nodes}",
            hint="ask for fewer nodes, or for more depth or top_k",
        )
    order = {path: node for node, path in enumerate(sorted(paths, key=lambda p: (len(p), p)), start=1)}
    return TreeShape.static((-1, *(order.get(path[:-1], 0) for path in order)))


def fixed_tree(tree: TreeShape) -> TreeShape:
    """The tree itself, or for a dynamic one the static tree of its sizes: sampled drafts need a fixed one."""
    if tree.kind != "dynamic":
        return tree
    return best_static(tree.depth, tree.top_k, tree.nodes)


def _whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{name} of a tree should be a whole number of at least {least}, found {value!r}",
            hint=f"give a {name} of {least} or more",
        )


def children_of(parents: tuple[int, ...]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    return children
