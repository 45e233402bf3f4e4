"""Exported graphs that the files of this folder share. Compiling needs TensorRT-RTX, but no GPU."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.enginemaker import DTYPES, Graphs, export, load


@pytest.fixture(scope="session")
def rtx() -> Any:
    """The TensorRT-RTX library; what needs it is skipped where it is not installed."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed: pip install 'eagle-export[rtx]'")
    from eagle_run.backends.library import find_library

    return find_library("tensorrt-rtx")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `enginemaker.load` keeps the tiny target and its heads."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def graphs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Graphs]:
    """precision, or precision-eagle1 -> its exported graphs, each exported once. Do not write into them."""
    made: dict[str, Graphs] = {}

    def get(name: str) -> Graphs:
        if name not in made:
            precision, _, kind = name.partition("-")
            modules = load(model_folder, DTYPES[precision], kind or "eagle3")
            made[name] = export(modules, tmp_path_factory.mktemp(name), precision)
        return made[name]

    return get


@pytest.fixture(autouse=True, scope="module")
def _thaw() -> Iterator[None]:
    """Behind a file everything may be collected again."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_collection(_thaw: None) -> Iterator[None]:
    """TensorRT calls the logger under a lock. A garbage collection that happens to run in there and frees the
    builder of an earlier test would wait for that lock forever.

    What is left of a collection is not looked at by the next one: all of torch takes half a second a test.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
