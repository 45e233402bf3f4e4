"""Words that are too long to be the name of a file, where a file may be meant, and names that we make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exportcli import Cli, fails

from eagle_export.data.generator import GeneratorOptions, open_generator
from eagle_export.pipeline.options import BuildOptions
from eagle_export.pipeline.plan import _default_folder
from eagle_export.reference.recipe import Recipe, find_head, find_target, load_recipe
from eagle_run.decoding.tree_spec import parse_tree_spec, spec_of
from eagle_run.errors import UsageError

LONG = "x" * 5000
PARENTS = ",".join(["0"] * 2000)


def test_a_tree_of_two_thousand_parents() -> None:
    shape = parse_tree_spec(f"static:{PARENTS}")
    assert shape.nodes == 2001
    assert spec_of(shape) == f"static:{PARENTS}"


def test_a_tree_that_is_no_tree() -> None:
    with pytest.raises(UsageError, match="neither a tree nor a file"):
        parse_tree_spec(LONG)


def test_such_a_tree_is_refused_for_its_size(eagle_run: Any, tiny_bundle: Path) -> None:
    command = ("generate", tiny_bundle, "--prompt", "hello", "--tree", f"static:{PARENTS}")
    fails(eagle_run(*command), 2, "2001")


@pytest.mark.parametrize("word", [LONG, "~no-such-user-here", "a\0b"], ids=["long", "user", "null"])
def test_no_target_and_no_head(word: str, tiny_target: Path) -> None:
    with pytest.raises(UsageError, match="unknown target"):
        find_target(word)
    with pytest.raises(UsageError, match="unknown target"):
        open_generator(word, GeneratorOptions("cpu"), 64, lambda _: None)
    recipe, _ = find_target(str(tiny_target))
    with pytest.raises(UsageError, match="unknown head"):
        find_head(word, recipe)
    with pytest.raises(UsageError, match="no such recipe file"):
        load_recipe(f"{word}.yaml")


@pytest.mark.parametrize("command", ["build", "sensitivity"])
def test_on_the_command_line(cli: Cli, command: str) -> None:
    fails(cli(command, "--target", LONG), 2, "unknown target")


def test_the_place_of_a_bundle_has_a_name_of_bounded_length() -> None:
    """Its parts may each be as long as a name can be. Other names give other places."""
    recipe, _ = find_target("smollm2-135m")
    heads = [f"some/{'y' * 200}{end}" for end in "ab"]
    places = [place_of(recipe.model_copy(update={"name": "x" * 200}), head) for head in heads]
    assert places[0] != places[1]
    assert {len(place.name) for place in places} == {128}
    assert place_of(recipe, "eagle3") == Path("bundles/smollm2-135m-eagle3")


def place_of(recipe: Recipe, head: str) -> Path:
    return _default_folder(BuildOptions(target="any", head=head), recipe)
