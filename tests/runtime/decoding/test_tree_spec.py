"""Trees as written on a command line or in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.decoding.tree_spec import TreeOptions, choose, describe, parse_spec, spec_of, static_from_json
from eagle_run.errors import EagleError, UsageError

OWN = TreeShape.dynamic(3, 3, 8)


@pytest.mark.parametrize(
    "shape",
    [TreeShape.plain(), TreeShape.chain(3), TreeShape.dynamic(4, 4, 16), TreeShape.static((-1, 0, 0, 1))],
)
def test_a_spec_names_its_tree(shape: TreeShape) -> None:
    assert parse_spec(spec_of(shape)) == shape
    assert describe(shape)


@pytest.mark.parametrize(
    "spec", ["", "chain", "chain:", "chain:x", "chain:1,2", "plain:1", "dynamic:2,2", "static:", "oak"]
)
def test_what_is_no_spec(spec: str) -> None:
    with pytest.raises(UsageError, match="neither a kind of tree"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (TreeOptions(), OWN),
        (TreeOptions("dynamic"), OWN),
        (TreeOptions(nodes=5), TreeShape.dynamic(3, 3, 5)),
        (TreeOptions("dynamic", depth=1), TreeShape.dynamic(1, 3, 4)),
        (TreeOptions("dynamic", 2, 2, 6), TreeShape.dynamic(2, 2, 6)),
        (TreeOptions("chain"), TreeShape.chain(3)),
        (TreeOptions("chain", depth=5), TreeShape.chain(5)),
        (TreeOptions("plain"), TreeShape.plain()),
        (TreeOptions("static"), best_static(3, 3, 8)),
        (TreeOptions("static", nodes=4), best_static(3, 3, 4)),
        (TreeOptions("static", parents="0,0,1"), TreeShape.static((-1, 0, 0, 1))),
        (TreeOptions(parents="-1, 0, 0, 1"), TreeShape.static((-1, 0, 0, 1))),
        (TreeOptions("chain:2"), TreeShape.chain(2)),
    ],
)
def test_sizes_not_given_are_the_bundles(options: TreeOptions, expected: TreeShape) -> None:
    assert choose(options, OWN) == expected


def test_other_defaults() -> None:
    static = TreeShape.static((-1, 0, 0))
    assert choose(TreeOptions(), static) == choose(TreeOptions("static"), static) == static
    assert choose(TreeOptions("dynamic"), TreeShape.chain(2)) == TreeShape.dynamic(4, 4, 16)
    assert choose(TreeOptions(), None) == TreeShape.plain()
    assert choose(TreeOptions("chain", depth=2), None) == TreeShape.chain(2)


def test_sampled_drafts_get_a_fixed_tree_unless_another_is_named() -> None:
    assert choose(TreeOptions(), OWN, "sampled") == best_static(3, 3, 8)
    assert choose(TreeOptions(), TreeShape.chain(2), "sampled") == TreeShape.chain(2)
    assert choose(TreeOptions("dynamic"), OWN, "sampled").kind == "dynamic"  # refused later, with a reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TreeOptions("dynamic", 2, 2, 99), "needs 98 candidates"),
        (TreeOptions("dynamic", depth=0), "depth of a tree"),
        (TreeOptions("chain", depth=0), "depth of a tree"),
        (TreeOptions("chain", depth=2, nodes=7), "has nodes 3"),
        (TreeOptions("plain", depth=2), "has depth 0"),
        (TreeOptions("static", parents="0,5"), "parent of node 2"),
        (TreeOptions("static", parents="0,,1"), "whole numbers"),
        (TreeOptions("static", parents="0,0", nodes=9), "has nodes 3"),
        (TreeOptions("chain:2", depth=3), "complete"),
    ],
)
def test_settings_that_make_no_sense(options: TreeOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(options, OWN)
    with pytest.raises(UsageError):
        choose(TreeOptions(depth=2), None)


def test_files(tmp_path: Path) -> None:
    expected = TreeShape.static((-1, 0, 0, 1))
    for data in ([-1, 0, 0, 1], [0, 0, 1], {"parents": [-1, 0, 0, 1]}, [[0, 0], [1], [0]]):
        file = tmp_path / "tree.json"
        file.write_text(json.dumps(data))
        assert choose(TreeOptions(str(file)), OWN) == expected


@pytest.mark.parametrize("text", ["{", "[]", "{}", '["a"]', "[[]]", "[true]", "[1.5]", "3"])
def test_files_that_hold_no_tree(text: str) -> None:
    with pytest.raises(EagleError, match=r"tree\.json"):
        static_from_json(text, "tree.json")


@pytest.mark.parametrize("paths", [[[0], [0, 1]], [[1]], [[0, 0]]])
def test_paths_with_gaps(paths: list[list[int]]) -> None:
    with pytest.raises(EagleError, match="needs path"):
        static_from_json(json.dumps(paths), "tree.json")
