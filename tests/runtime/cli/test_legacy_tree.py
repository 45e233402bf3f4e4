"""Trees as they were written on a command line before `--tree SPEC` said it all."""

from __future__ import annotations

import pytest

from eagle_run.cli.legacy_tree import TreeOptions, legacy_tree
from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.errors import UsageError

OWN = TreeShape.dynamic(3, 3, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
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
    ],
)
def test_sizes_not_given_are_the_bundles(options: TreeOptions, expected: TreeShape) -> None:
    assert legacy_tree(options, OWN, fixed=False) == expected


def test_other_defaults() -> None:
    static = TreeShape.static((-1, 0, 0))
    assert legacy_tree(TreeOptions(), static, fixed=False) == static
    assert legacy_tree(TreeOptions("static"), static, fixed=False) == static
    assert legacy_tree(TreeOptions("dynamic"), TreeShape.chain(2), fixed=False) == TreeShape.dynamic(4, 4, 16)
    assert legacy_tree(TreeOptions("chain", depth=2), None, fixed=False) == TreeShape.chain(2)


def test_sampled_drafts_get_a_fixed_tree_unless_another_is_named() -> None:
    assert legacy_tree(TreeOptions(), OWN, fixed=True) == best_static(3, 3, 8)
    assert legacy_tree(TreeOptions(), TreeShape.chain(2), fixed=True) == TreeShape.chain(2)
    assert (
        legacy_tree(TreeOptions("dynamic"), OWN, fixed=True).kind == "dynamic"
    )  # refused later, with a reason


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
    def tree() -> TreeShape:
        options.check()
        return legacy_tree(options, OWN, fixed=False)

    with pytest.raises(UsageError, match=message):
        tree()
    with pytest.raises(UsageError):
        legacy_tree(TreeOptions(depth=2), None, fixed=False)
