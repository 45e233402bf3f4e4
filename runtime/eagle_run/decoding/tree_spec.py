"""Trees as a user writes them: `chain:3`, `dynamic:4,4,16`, `static:0,0,1`, a file, a kind with options."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_run.datasets import read_text
from eagle_run.decoding.tree import TreeShape, best_static, parse_tree
from eagle_run.errors import EagleError, UsageError
from eagle_run.json_files import parse_json

KINDS = ("dynamic", "static", "chain", "plain")
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


def choose(options: TreeOptions, default: TreeShape | None, rule: str = "topk") -> TreeShape:
    """The tree that `options` ask for (any but "auto"); `default` is the bundle's own, None without a head.

    A size that is not given comes from the bundle's tree. The sampled rule needs a fixed tree: where the user
    names no kind, a dynamic default becomes the static tree of its sizes. Raises UsageError for a spec that
    cannot be read, sizes that contradict each other, and sizes given beside a complete spec.
    """
    name = options.tree
    if name == "default" and options.parents is not None:
        name = "static"
    if name == "default":
        return _default(options, default, rule)
    if name in KINDS:
        return _of_kind(name, options, default)
    if options.sized or options.parents is not None:
        raise UsageError(
            f"--tree {name} is complete; it takes no sizes beside it",
            hint="leave out --depth, --branch, --nodes and --parents, or name only a kind of tree",
        )
    if os.path.isfile(name):  # where Path would raise for a spec that is too long to be a name
        return static_from_json(read_text(name), name)
    return parse_spec(name)


def parse_spec(spec: str) -> TreeShape:
    """`plain`, `chain:DEPTH`, `dynamic:DEPTH,BRANCH,NODES` or `static:PARENT,PARENT,...` → the tree.

    The parents are those of nodes 1, 2, ...; node 0 is the root, and -1 for it may stand in front.
    """
    kind, _, rest = spec.partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = []
    if kind == "plain" and not rest:
        return TreeShape.plain()
    if kind == "chain" and len(numbers) == 1:
        return TreeShape.chain(*numbers)
    if kind == "dynamic" and len(numbers) == 3:
        return TreeShape.dynamic(*numbers)
    if kind == "static" and numbers:
        return TreeShape.static(_rooted(numbers))
    raise UsageError(
        f"--tree {spec}: neither a kind of tree, a spec nor a file",
        hint=f"one of default, auto, {', '.join(KINDS)}; or chain:DEPTH, dynamic:DEPTH,BRANCH,NODES, "
        "static:PARENT,PARENT,...; or a JSON file with parents",
    )


def spec_of(shape: TreeShape) -> str:
    """The inverse of `parse_spec`."""
    if shape.kind == "dynamic":
        return f"dynamic:{shape.depth},{shape.top_k},{shape.nodes}"
    if shape.kind == "static":
        return "static:" + ",".join(map(str, (shape.parents or ())[1:]))
    return f"chain:{shape.depth}" if shape.kind == "chain" else "plain"


def describe(shape: TreeShape) -> str:
    """A few words for a log line."""
    if shape.kind == "plain":
        return "plain decoding"
    if shape.kind == "chain":
        return f"chain of {shape.depth}"
    return f"{shape.kind} tree of {shape.nodes} nodes, depth {shape.depth}"


def static_from_json(text: str, where: str) -> TreeShape:
    """A static tree from JSON: a list of parents, {"parents": [...]}, or a list of paths of ranks.

    Paths are how SafeAILab writes trees, [[0], [1], [0, 0]]: the first and second child of the root, and the
    first child of the first.
    """
    data = parse_json(text, where)
    if isinstance(data, dict):
        data = data.get("parents")
    if _whole_numbers(data):
        return TreeShape.static(_rooted(data))
    if isinstance(data, list) and data and all(path and _whole_numbers(path) for path in data):
        return TreeShape.static(_from_paths([tuple(path) for path in data], where))
    raise EagleError(
        f"{where}: expected a list of parents such as [-1, 0, 0, 1], or of paths such as [[0], [1], [0, 0]]"
    )


def _from_paths(paths: Sequence[tuple[int, ...]], where: str) -> tuple[int, ...]:
    ordered = sorted(set(paths), key=lambda path: (len(path), path))
    places = {path: place for place, path in enumerate(ordered, start=1)}
    for path in ordered:
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if before and before not in places:
            raise EagleError(
                f"{where}: path {list(path)} needs path {list(before)}",
                hint="every path needs its parent and the ranks before its own",
            )
    return (-1, *(places.get(path[:-1], 0) for path in ordered))


def _default(options: TreeOptions, default: TreeShape | None, rule: str) -> TreeShape:
    if default is None:
        if options.sized:
            raise UsageError(
                "this bundle has no draft head, so it has no tree", hint="leave out the tree's sizes"
            )
        return TreeShape.plain()
    if rule == "sampled" and default.kind == "dynamic":
        return _of_kind("static", options, default)
    return _of_kind(default.kind, options, default)


def _of_kind(kind: str, options: TreeOptions, default: TreeShape | None) -> TreeShape:
    if default is not None and kind == default.kind and not options.sized and options.parents is None:
        return default
    if kind == "plain" or options.parents is not None:
        parents = None if options.parents is None else _rooted(_numbers(options.parents))
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


def _rooted(parents: Sequence[int]) -> tuple[int, ...]:
    return tuple(parents) if parents and parents[0] == -1 else (-1, *parents)


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", text):
        raise UsageError(f"--parents {text}: expected whole numbers with commas, such as 0,0,1")
    return [int(part) for part in text.split(",")]


def _whole_numbers(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
