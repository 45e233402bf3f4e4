"""More threads than cores wait for each other in turns: refused everywhere, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exportcli import Cli, fails

from eagle_export.data.generator import GeneratorOptions, open_generator
from eagle_export.progress import Progress
from eagle_export.verify.verification import verify_bundle
from eagle_run.backends import environment, onnxruntime
from eagle_run.backends.environment import thread_count
from eagle_run.backends.onnxruntime import OnnxRuntimeGraph
from eagle_run.bundle.loading import load_bundle
from eagle_run.engine.graph_loading import load_graphs
from eagle_run.engine.loading import load_engine
from eagle_run.errors import UsageError

REFUSED = "threads is 5, but this process may use 4 cores"


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 4)


@pytest.mark.parametrize(("asked", "given"), [(0, 4), (1, 1), (4, 4)])
def test_as_many_threads_as_cores(asked: int, given: int) -> None:
    assert thread_count(asked) == given


@pytest.mark.parametrize(("threads", "message"), [(5, REFUSED), (999, "threads is 999"), (-1, "0 or more")])
def test_the_refusal_names_the_parameter(threads: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        thread_count(threads)
    assert caught.value.parameters == ("threads",)
    assert "0 takes one per core" in caught.value.hint


def test_one_core_is_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 1)
    with pytest.raises(UsageError, match=r"may use 1 core\n"):
        thread_count(2)


def test_no_graph_is_loaded(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the runtime's and in the exporter's Python API."""
    monkeypatch.setattr(onnxruntime, "_import_onnxruntime", lambda: pytest.fail("ONNX Runtime was loaded"))
    with pytest.raises(UsageError, match=REFUSED):
        load_engine(tiny_bundle, threads=5)
    with pytest.raises(UsageError, match=REFUSED):
        load_graphs(load_bundle(tiny_bundle), threads=5)
    with pytest.raises(UsageError, match=REFUSED):
        OnnxRuntimeGraph(tiny_bundle / "target.onnx", "target", threads=5)
    with pytest.raises(UsageError, match=REFUSED):
        verify_bundle(tiny_bundle, Progress(quiet=True), threads=5)
    with pytest.raises(UsageError, match=REFUSED):
        open_generator("no such target", GeneratorOptions(threads=5), 64, lambda _: None)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "hello"),
        ("chat",),
        ("bench", "--dataset", "prompts.jsonl"),
    ],
    ids=lambda command: command[0],
)
def test_eagle_run_names_its_option(
    eagle_run: Any,
    tiny_bundle: Path,
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('"hello"\n')
    name, *more = command
    fails(eagle_run(name, tiny_bundle, *more, "--threads", 5), 2, REFUSED, "(--threads)")


@pytest.mark.parametrize(
    "command",
    [
        ("build", "--target", "no-such-target"),
        ("export", "--target", "no-such-target", "--out", "nowhere"),
        ("verify", "no-such-bundle"),
        ("data", "no-such-target", "--self-play", "1", "--out", "nowhere"),
        ("train", "no-such-target", "--data", "nothing", "--out", "nowhere"),
        ("sensitivity", "--target", "no-such-target"),
    ],
    ids=lambda command: command[0],
)
def test_eagle_export_names_its_option(cli: Cli, command: tuple[str, ...]) -> None:
    fails(cli(*command, "--threads", 5), 2, REFUSED, "(--threads)")
