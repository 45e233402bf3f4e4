"""Builds that end early, by a key, a signal or an error: what is left, and how the next one goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.exportcli import Cli, leftovers

import eagle_export.pipeline.build
from eagle_export.cli.main import run
from eagle_run.bundle.loading import Bundle, load_bundle

SMALL = ("--max-seq-len", "64", "--prefill-chunk", "16", "--max-tree-nodes", "16", "--max-batch", "2")
TREE = ("--tree", "dynamic", "--depth", "2", "--branch", "2", "--nodes", "4")


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _out_of_space(*arguments: Any, **__: Any) -> None:
    (arguments[3] / "half.onnx").write_bytes(b"half")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "code", "words"), [(_interrupt, 130, "interrupted"), (_out_of_space, 1, "disk is full")]
)
def test_a_build_that_ends_before_anything_is_finished_leaves_what_was_there(
    *,
    fault: Any,
    code: int,
    words: str,
    cli: Cli,
    built_bundle: Path,
    tiny_target: Path,
    tiny_head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = shutil.copytree(built_bundle, tmp_path / "b")
    before = (out / "manifest.json").read_bytes()
    monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", fault)
    paths = ["--target", tiny_target, "--head", tiny_head, "--out", out, "--force"]
    outcome = cli("build", *paths, *SMALL, *TREE)
    assert outcome.code == code
    assert words in outcome.err
    assert "nothing is kept" in outcome.err
    assert outcome.out == ""
    assert leftovers(tmp_path) == ["b"]
    assert (out / "manifest.json").read_bytes() == before
    load_bundle(out)


# Says "exporting" and waits where it should export the graph that is its first argument.
_SLOW_BUILD = """
import sys, time
import eagle_export.pipeline.build
from eagle_export.cli.main import main

def export_graph(name, modules, limits, folder, report, **options):
    if name != slow:
        return export(name, modules, limits, folder, report, **options)
    (folder / "half.onnx").write_bytes(b"half")
    print("exporting", flush=True)
    time.sleep(60)

export = eagle_export.pipeline.build.export_graph
eagle_export.pipeline.build.export_graph = export_graph
slow = sys.argv.pop(1)
main()
"""


def end(slow: str, by: signal.Signals, *command: object) -> tuple[int, str]:
    """Runs a command until it exports the graph `slow`, and ends it: (exit code, what it told)."""
    program = [sys.executable, "-c", _SLOW_BUILD, slow, *map(str, command)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "exporting\n"
        process.send_signal(by)
        _, told = process.communicate(timeout=60)
    return process.returncode, told


def contents(bundle: Bundle) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in bundle.manifest.files()}


@pytest.mark.slow
def test_a_build_that_is_terminated_at_its_first_graph_leaves_nothing(
    tiny_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "b"
    code, told = end(
        "target", signal.SIGTERM, "build", "--target", tiny_target, "--head", "none", "--out", out, *SMALL
    )
    assert code == 130, told
    assert "interrupted" in told
    assert leftovers(out.parent) == []


@pytest.fixture(scope="module")
def command(tiny_target: Path, tiny_head: Path) -> list[str]:
    """Builds target and head, but for --out."""
    return ["build", "--target", str(tiny_target), "--head", str(tiny_head), *SMALL, *TREE]


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command builds in one go. Do not write into it."""
    out = tmp_path_factory.mktemp("whole") / "b"
    assert run([*command, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_goes_on_after_an_end_of_any_kind(
    *, by: signal.Signals, cli: Cli, command: list[str], whole: Path, tmp_path: Path
) -> None:
    """Finished graphs are not exported again, and the bundle is the one that a build in one go makes."""
    out = tmp_path / "out" / "b"
    code, told = end("draft", by, *command, "--out", out)
    assert code == (130 if by == signal.SIGTERM else -by), told
    assert leftovers(out.parent) == ["b.partial"]
    assert ("finished parts are kept" in told) == (by == signal.SIGTERM)
    outcome = cli(*command, "--out", out, "--json")
    assert outcome.code == 0, outcome
    steps = json.loads(outcome.out)["steps"]
    assert "export draft" in steps
    assert not {"export target", "export fuse"} & set(steps)
    for graph in ("target", "fuse"):
        assert f"export {graph}: taken over" in outcome.err
    assert leftovers(out.parent) == ["b"]
    assert contents(load_bundle(out)) == contents(load_bundle(whole))
    assert leftovers(out) == leftovers(whole)


def stop_at(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the export of a graph, once."""
    export = eagle_export.pipeline.build.export_graph

    def export_graph(name: str, *arguments: Any, **options: Any) -> Any:
        if name == graph:
            monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", export)
            raise KeyboardInterrupt
        return export(name, *arguments, **options)

    monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", export_graph)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--fresh"], ["--max-seq-len", "48"]])
def test_another_command_line_or_fresh_starts_over(
    more: list[str], cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b"
    command = ["build", "--target", tiny_target, "--head", "none", "--out", out, *SMALL]
    monkeypatch.setattr(eagle_export.pipeline.build, "_add_graphs", _interrupt)
    assert cli(*command).code == 130
    assert leftovers(tmp_path) == ["b.partial"]
    monkeypatch.undo()
    outcome = cli(*command, *more)
    assert outcome.code == 0, outcome
    assert "taken over" not in outcome.err
    if "--fresh" not in more:
        assert "b.partial is of another run (limits.max_seq_len" in outcome.err
    assert leftovers(tmp_path) == ["b"]


def test_graphs_alone_go_on_too(
    cli: Cli, tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b"
    command = ["export", "--target", tiny_target, "--head", tiny_head, "--out", out, *SMALL, *TREE]
    stop_at("draft", monkeypatch)
    assert cli(*command).code == 130
    outcome = cli(*command)
    assert outcome.code == 0, outcome
    assert "export target: taken over" in outcome.err
    graphs = [f"{graph}.onnx{data}" for graph in ("draft", "fuse", "target") for data in ("", ".data")]
    assert leftovers(out) == [*graphs, "vocab_map.safetensors"]


@pytest.mark.slow
def test_a_calibration_and_what_was_measured_are_not_repeated(
    cli: Cli, tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted behind the calibration and behind the measurement; the bundle is that of one go."""
    out = tmp_path / "b"
    command = ["build", "--target", tiny_target, "--head", tiny_head, "--precision", "fp8", *SMALL, *TREE]
    stop_at("target", monkeypatch)
    assert cli(*command, "--out", out).code == 130
    monkeypatch.setattr(eagle_export.pipeline.build, "quantization_info", _interrupt)
    second = cli(*command, "--out", out)
    assert second.code == 130
    assert "calibrate fp8: taken over" in second.err
    monkeypatch.undo()
    third = cli(*command, "--out", out, "--json")
    assert third.code == 0, third
    for step in ("calibrate fp8", "export target", "export draft", "measure the accuracy"):
        assert f"{step}: taken over" in third.err
    assert not {"calibrate fp8", "load the weights in fp32", "load the weights"} & set(
        json.loads(third.out)["steps"]
    )
    assert cli(*command, "--out", tmp_path / "whole").code == 0
    resumed, whole = load_bundle(out), load_bundle(tmp_path / "whole")
    assert contents(resumed) == contents(whole)
    assert resumed.manifest.quantization == whole.manifest.quantization
    assert resumed.manifest.accuracy == whole.manifest.accuracy


def test_what_was_interrupted_while_measuring_can_be_finished_without(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b"
    command = [
        "build",
        "--target",
        tiny_target,
        "--head",
        "none",
        "--precision",
        "fp16",
        "--out",
        out,
        *SMALL,
    ]
    monkeypatch.setattr(eagle_export.pipeline.build, "measure_accuracy", _interrupt)
    assert cli(*command).code == 130
    outcome = cli(*command, "--no-measure")
    assert outcome.code == 0, outcome
    assert "export target: taken over" in outcome.err


def test_a_bad_input_leaves_nothing_even_behind_finished_graphs(
    cli: Cli, tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_run.errors import EagleError

    export = eagle_export.pipeline.build.export_graph

    def export_graph(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "draft":
            raise EagleError("a weight of the head is not finite")
        return export(name, *arguments, **options)

    monkeypatch.setattr(eagle_export.pipeline.build, "export_graph", export_graph)
    paths = ["--target", tiny_target, "--head", tiny_head, "--out", tmp_path / "b"]
    outcome = cli("build", *paths, *SMALL, *TREE)
    assert outcome.code == 1
    assert leftovers(tmp_path) == []
