"""Pure part of the tree "auto": a tree's speed from forward times and a wide tree's accepted paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.errors import UsageError

MARGIN = 1.02  # a tree must beat plain decoding by this much
SHARE = 0.75  # on at least this share of the pairs
_SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # nodes of the trees that are predicted


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward by its number of rows, and of what a round does outside the graphs.

    `glue` holds a round without draft, and one more per draft level. `fuse` is empty for a head without it.
    """

    target: Mapping[int, float]
    draft: Mapping[int, float]
    glue: tuple[float, float]
    fuse: Mapping[int, float] = field(default_factory=dict)

    def round(self, shape: TreeShape) -> float:
        """Predicted seconds of a round: fuse and prime, one forward a level, verification, and the rest."""
        seconds = interpolate(self.target, shape.nodes) + self.glue[0] + self.glue[1] * len(shape.levels)
        if shape.levels:
            seconds += interpolate(self.draft, shape.depth + 1)
            seconds += interpolate(self.fuse, shape.depth + 1) if self.fuse else 0.0
            seconds += sum(interpolate(self.draft, level.width) for level in shape.levels[1:])
        return seconds


def interpolate(known: Mapping[int, float], size: int) -> float:
    """Linear between measured sizes, and along the last two beyond them."""
    sizes = sorted(known)
    if size in known or len(sizes) == 1:
        return known.get(size, known[sizes[0]])
    above = next((i for i, s in enumerate(sizes) if s > size), len(sizes) - 1)
    low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
    slope = (known[high] - known[low]) / (high - low)
    return known[low] + slope * (size - low)


def tokens_per_round(shape: TreeShape, paths: Sequence[tuple[int, ...]]) -> float:
    """Expected tokens of a round with a fixed tree, from paths that a wide tree accepted.

    A path is the rank among its siblings of each accepted node, from the root down. The smaller tree would
    have followed it as far as it has those nodes.
    """
    has = set(rank_paths(shape.table or ()))
    reached = [next((d for d in range(len(path)) if path[: d + 1] not in has), len(path)) for path in paths]
    return 1 + sum(reached) / len(paths)


def rank_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For every node of a tree, the ranks among siblings on its way from the root (() for the root)."""
    paths: list[tuple[int, ...]] = []
    children = [0] * len(parents)
    for parent in parents:
        if parent < 0:
            paths.append(())
            continue
        paths.append((*paths[parent], children[parent]))
        children[parent] += 1
    return paths


def rank_acceptance(paths: Sequence[tuple[int, ...]], *, depth: int, top_k: int) -> tuple[float, ...]:
    """How often the child of rank 0, 1, … was the accepted one, over all visits above `depth`; never rising.

    Every rank gets half a count, so that one not seen in a short run is unlikely rather than impossible.
    """
    visits = sum(min(len(path) + 1, depth) for path in paths)
    counts = [0.5 + sum(path.count(rank) for path in paths) for rank in range(top_k)]
    shares = [count / (visits + top_k) for count in counts]
    return tuple(min(shares[: rank + 1]) for rank in range(top_k))


def shortlist(
    costs: Costs, paths: Sequence[tuple[int, ...]], *, seen: TreeShape, max_nodes: int, keep: int
) -> list[TreeShape]:
    """The `keep` fixed trees with the most predicted tokens a second, best first, all of different sizes.

    `seen` is the wide tree that gave the paths.
    """
    top_k = seen.top_k
    ranks = rank_acceptance(paths, depth=seen.depth, top_k=top_k)
    shapes: set[TreeShape] = {
        TreeShape.chain(depth) for depth in range(1, seen.depth + 1) if depth < max_nodes
    }
    for depth in range(1, seen.depth + 1):
        for nodes in _SIZES:
            if nodes <= max_nodes:
                try:
                    shapes.add(best_static(depth, top_k, nodes, ranks))
                except UsageError:
                    break  # no room for that many nodes, nor for more
    ranked = sorted(shapes, key=lambda shape: costs.round(shape) / tokens_per_round(shape, paths))
    best: list[TreeShape] = []
    for shape in ranked:
        if len(best) < keep and all(shape.nodes != other.nodes for other in best):
            best.append(shape)
    return best


def dynamic_like(shape: TreeShape) -> TreeShape:
    """The dynamic tree of a fixed one's sizes, but with no more nodes than its levels give candidates."""
    top_k = max(2, shape.top_k)
    return TreeShape.dynamic(shape.depth, top_k, min(shape.nodes, 1 + top_k + (shape.depth - 1) * top_k**2))


def decide(ratios: Mapping[TreeShape, Sequence[float]]) -> tuple[TreeShape, float]:
    """The winner by median of its ratios to plain decoding, or plain decoding if none wins clearly."""
    best, speedup = TreeShape.plain(), 1.0
    for shape, values in ratios.items():
        ratio = median(values)
        wins = sum(value > 1 for value in values) / len(values)
        if ratio >= MARGIN and wins >= SHARE and ratio > speedup:
            best, speedup = shape, ratio
    return best, speedup
