"""The old way to say a tree: a kind, and its sizes as options. `--tree SPEC` says it all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_run.decoding.tree import TreeShape, best_static, parse_tree
from eagle_run.decoding.tree_spec import KINDS, rooted
from eagle_run.errors import UsageError

_FALLBACK = (4, 4, 16)  # depth, top_k, nodes where neither the user nor the bundle's tree says


@dataclass(frozen=True)
class TreeOptions:
    """What the command line says about the tree; None where it is silent. `nodes` counts the root."""

    tree: str = "default"
    depth: int | None = None
    top_k: int | None = None
    nodes: int | None = None
    parents: str | None = None

    @property
    def sized(self) -> bool:
        """Is any of depth, top_k and nodes given?"""
        return (self.depth, self.top_k, self.nodes) != (None, None, None)

    @property
    def is_legacy(self) -> bool:
        """Whether it is said the old way: sizes as options, or a bare kind that lacks them."""
        return self.sized or self.parents is not None or self.tree in ("dynamic", "static", "chain")

    def check(self) -> None:
        """Raises UsageError for sizes beside a tree that is complete."""
        if not self.sized and self.parents is None:
            return
        if self.tree == "auto":
            raise UsageError("--tree auto finds the sizes itself", hint="leave out the tree's sizes")
        if self.tree not in (*KINDS, "default"):
            raise UsageError(
                f"--tree {self.tree} is complete; it takes no sizes beside it",
                hint="leave out --depth, --branch, --nodes and --parents",
            )


def legacy_tree(options: TreeOptions, default: TreeShape | None, *, fixed: bool) -> TreeShape:
    """The tree that `options` mean; `default` is the bundle's own, None without a head.

    A size that is not given comes from the bundle's tree. `fixed`: where the user names no kind, a dynamic
    default becomes the static tree of its sizes. Raises UsageError for sizes that contradict each other.
    """
    kind = options.tree
    if kind == "default" and options.parents is not None:
        kind = "static"
    if kind == "default":
        if default is None:
            raise UsageError(
                "this bundle has no draft head, so it has no tree", hint="leave out the tree's sizes"
            )
        kind = "static" if fixed and default.kind == "dynamic" else default.kind
    return _of_kind(kind, options, default)


def _of_kind(kind: str, options: TreeOptions, default: TreeShape | None) -> TreeShape:
    if default is not None and kind == default.kind and not options.sized and options.parents is None:
        return default
    if kind == "plain" or options.parents is not None:
        parents = None if options.parents is None else rooted(_numbers(options.parents))
        return parse_tree(kind, options.depth, options.top_k, options.nodes, parents)
    if kind == "chain":
        depth = options.depth
        if depth is None:
            depth = _FALLBACK[0] if default is None else default.depth
        return parse_tree("chain", depth, options.top_k, options.nodes)
    sizes = _sizes(options, default)
    return best_static(*sizes) if kind == "static" else TreeShape.dynamic(*sizes)


def _sizes(options: TreeOptions, default: TreeShape | None) -> tuple[int, int, int]:
    """(depth, top_k, nodes): as given, else the bundle's, else usual ones; nodes not given are cut to fit."""
    known = _FALLBACK
    if default is not None and default.kind in ("dynamic", "static"):
        known = (default.depth, default.top_k, default.nodes)
    depth = known[0] if options.depth is None else options.depth
    top_k = known[1] if options.top_k is None else options.top_k
    if options.nodes is not None or depth < 1 or top_k < 1:
        return depth, top_k, known[2] if options.nodes is None else options.nodes
    return depth, top_k, min(known[2], 1 + top_k + (depth - 1) * top_k**2)


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", text):
        raise UsageError(f"--parents {text}: expected whole numbers with commas, such as 0,0,1")
    return [int(part) for part in text.split(",")]
