"""Trees as a user writes them: `plain`, `chain:3`, `dynamic:4,4,16`, `static:0,0,1`, or a file of parents."""

from __future__ import annotations

import os
from collections.abc import Sequence

from eagle_run.datasets import read_text
from eagle_run.decoding.tree import TreeShape
from eagle_run.errors import EagleError, UsageError
from eagle_run.json_files import parse_json

KINDS = ("dynamic", "static", "chain", "plain")
SYNTAX = "plain, chain:DEPTH, dynamic:DEPTH,TOP_K,NODES, static:PARENT,PARENT,... or a JSON file of parents"


def parse_tree_spec(spec: str) -> TreeShape:
    """What a user means by a tree: a spec, or the path of a file as `static_from_json` reads it.

    Raises UsageError for what is neither, and EagleError for a file that holds no tree.
    """
    if spec.partition(":")[0] in KINDS or not os.path.isfile(spec):
        return parse_spec(spec)
    return static_from_json(read_text(spec), spec)


def parse_spec(spec: str) -> TreeShape:
    """`plain`, `chain:DEPTH`, `dynamic:DEPTH,TOP_K,NODES` or `static:PARENT,PARENT,...` → the tree.

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
        return TreeShape.static(rooted(numbers))
    raise UsageError(
        f"{spec!r} is neither a tree nor a file", hint=f"a tree is one of {SYNTAX}", parameters=["tree"]
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
        return TreeShape.static(rooted(data))
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


def rooted(parents: Sequence[int]) -> tuple[int, ...]:
    """The parents with -1 for the root in front, where it is left out."""
    return tuple(parents) if parents and parents[0] == -1 else (-1, *parents)


def _whole_numbers(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
