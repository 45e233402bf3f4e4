"""A checkpoint that is written to while it is exported: no bundle of two mixed models is made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.exportcli import Cli, fails, leftovers
from support.tiny import write_head, write_target

import eagle_export.pipeline.build
from eagle_run.bundle.loading import load_bundle

SMALL = ("--max-seq-len", "64", "--prefill-chunk", "16", "--max-tree-nodes", "16", "--max-batch", "2")
TREE = ("--tree", "dynamic", "--depth", "2", "--branch", "2", "--nodes", "4")
TOLD = "the weights changed while they were exported"


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, Path, str, Path]:
    """A target and a head as options, in a folder of their own."""
    target = write_target(tmp_path / "models" / "target")
    return "--target", target, "--head", write_head(tmp_path / "models" / "head", target)


def swap_after(step: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does `change` once a function of the build is done, for the graph `fuse` if it is export_graph."""
    function = getattr(eagle_export.pipeline.build, step)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if step != "export_graph" or arguments[0] == "fuse":
            change()
        return result

    monkeypatch.setattr(eagle_export.pipeline.build, step, wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["build head", "export target"])
def test_weights_that_change_during_an_export_end_it(
    cli: Cli,
    sources: tuple[str, Path, str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    command, part = what.split()
    file = tmp_path / "models" / part / "model.safetensors"
    swap_after("export_graph", file.touch, monkeypatch)
    fails(cli(command, *sources, *SMALL, *TREE, "--out", tmp_path / "b"), 1, TOLD, str(file))
    assert leftovers(tmp_path) == ["models"]


@pytest.mark.slow
def test_weights_that_change_at_the_end_leave_the_old_bundle(
    cli: Cli,
    sources: tuple[str, Path, str, Path],
    built_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was finished before is of the weights as they were: with these it is taken over."""
    out = shutil.copytree(built_bundle, tmp_path / "b")
    before = (out / "manifest.json").read_bytes()
    file, aside = tmp_path / "models" / "target" / "model.safetensors", tmp_path / "aside"

    def change() -> None:
        file.rename(aside)
        shutil.copyfile(aside, file)

    swap_after("target_info", change, monkeypatch)
    command = ("build", *sources, *SMALL, *TREE, "--out", out, "--force")
    fails(cli(*command), 1, TOLD, str(file))
    assert (out / "manifest.json").read_bytes() == before
    load_bundle(out)
    monkeypatch.undo()
    aside.replace(file)
    outcome = cli(*command)
    assert outcome.code == 0, outcome
    assert "export draft: taken over" in outcome.err
    assert leftovers(tmp_path) == ["b", "models"]
