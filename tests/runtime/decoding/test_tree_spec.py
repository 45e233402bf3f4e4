"""Trees as written on a command line or in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_run.decoding.tree import TreeShape
from eagle_run.decoding.tree_spec import describe, parse_spec, parse_tree_spec, spec_of, static_from_json
from eagle_run.errors import EagleError, UsageError


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
    with pytest.raises(UsageError, match="neither a tree nor a file"):
        parse_spec(spec)


def test_files(tmp_path: Path) -> None:
    expected = TreeShape.static((-1, 0, 0, 1))
    for data in ([-1, 0, 0, 1], [0, 0, 1], {"parents": [-1, 0, 0, 1]}, [[0, 0], [1], [0]]):
        file = tmp_path / "tree.json"
        file.write_text(json.dumps(data))
        assert parse_tree_spec(str(file)) == expected


@pytest.mark.parametrize("text", ["{", "[]", "{}", '["a"]', "[[]]", "[true]", "[1.5]", "3"])
def test_files_that_hold_no_tree(text: str) -> None:
    with pytest.raises(EagleError, match=r"tree\.json"):
        static_from_json(text, "tree.json")


@pytest.mark.parametrize("paths", [[[0], [0, 1]], [[1]], [[0, 0]]])
def test_paths_with_gaps(paths: list[list[int]]) -> None:
    with pytest.raises(EagleError, match="needs path"):
        static_from_json(json.dumps(paths), "tree.json")


def test_a_spec_longer_than_a_file_name_is_a_spec() -> None:
    parents = tuple([-1, *range(2000)])
    assert parse_tree_spec("static:" + ",".join(map(str, parents[1:]))) == TreeShape.static(parents)
    with pytest.raises(UsageError, match="neither a tree nor a file"):
        parse_tree_spec("oak" * 2000)
