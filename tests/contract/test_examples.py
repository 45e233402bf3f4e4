"""Every example runs, and does what it says."""

from __future__ import annotations

import io
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tinybundle import make_bundle

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("examples") / "tiny")


@pytest.fixture
def example(capsys: pytest.CaptureFixture[str], bundle: Path) -> Callable[[str], str]:
    """name -> what the example prints."""

    def call(name: str) -> str:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](str(bundle))
        return capsys.readouterr().out

    return call


def test_all_are_here() -> None:
    assert EXAMPLES == ["async_requests", "chat", "engine", "offline", "streaming"]


def test_offline(example: Callable[[str], str]) -> None:
    lines = example("offline").splitlines()
    assert next(line for line in lines if not line.startswith(" ")) == "The capital of France is"
    assert sum(line.startswith("  [") for line in lines) == 6
    assert sum("tokens per round" in line for line in lines) == 3


def test_streaming(example: Callable[[str], str]) -> None:
    assert example("streaming").rpartition("\n")[0].count("least sure of: '") == 1


def test_async_requests(example: Callable[[str], str]) -> None:
    lines = example("async_requests").splitlines()
    assert lines[::2] == ["What is a fjord?", "Name three trees.", "What is 17 + 25?", "Who wrote Faust?"]
    assert all(len(line) > 8 for line in lines[1::2])


def test_chat(example: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand?\n"))
    assert example("chat").strip()


def test_engine(example: Callable[[str], str]) -> None:
    lines = example("engine").splitlines()
    names = [line.split()[1] for line in lines]
    assert names[:3] == ["first"] * 3
    assert "second" in names[3:5]
    assert max(int(line.split()[0]) for line in lines if line.split()[1] == "first") == 7
    assert names[-1] == "second"
