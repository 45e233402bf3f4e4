"""Fixtures that several folders of tests share; being here puts tests/ on the import path.

`tiny_bundle` is made by hand and knows no exporter; `built_bundle` comes out of the real pipeline.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock

from eagle_run.bundle.hashing import cache_dir

if TYPE_CHECKING:
    from support.trtdouble import World

ROOT = Path(__file__).parent.parent

# Tests send SIGINT, to themselves and to children. Started in a script's background, Python would ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--smollm2-bundle",
        type=Path,
        help="a built smollm2-135m-eagle3 bundle for the tests marked real (default: build one)",
    )
    parser.addoption(
        "--amx",
        choices=("on", "off"),
        default="off",
        help="whether the processor seems to have AMX: the trainer and the data generator then take bf16",
    )
    parser.addoption("--torch-threads", type=int, default=1, help="threads of torch inside an operator")


def pytest_configure(config: pytest.Config) -> None:
    """Makes every machine the same one: no test depends on what this processor multiplies fast.

    Before any test module is imported, for some compute while they are.
    """
    has_amx = config.getoption("--amx") == "on"
    torch.cpu._is_amx_tile_supported = lambda: has_amx
    torch.set_num_threads(config.getoption("--torch-threads"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write the user's cache (remembered hashes and trees), nor anything below HOME.

    Only the dequantised demo weights are shared with it, where it can be written: making them takes longer
    than many tests.
    """
    cache, home = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("home")
    weights = cache_dir("eagle-export") / "weights"
    with contextlib.suppress(OSError):
        weights.mkdir(parents=True, exist_ok=True)
    (cache / "eagle-export").mkdir()
    if weights.is_dir():
        (cache / "eagle-export" / "weights").symlink_to(weights, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("HOME", str(home))
        yield


def pytest_runtest_setup() -> None:
    """Torch reads the source of its ONNX functions again for each export: half of the time of a tiny one.
    Tests export hundreds of times, so here it reads them once a process."""
    registration: Any = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(registration, "ONNXRegistry", None)
    if registry is None or hasattr(registry, "read_once"):  # nothing was exported so far, or this is done
        return
    read, default = registry.from_torchlib, registration._constants.TORCHLIB_OPSET
    registry.read_once = functools.cache(read)

    def from_torchlib(_: object, opset_version: int = default) -> Any:
        made = copy.copy(registry.read_once(opset_version))
        made.functions = {name: [*found] for name, found in made.functions.items()}  # exports add their own
        return made

    registry.from_torchlib = classmethod(from_torchlib)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """(name, make) -> a new folder that `make` fills, once for all processes of this run of the tests."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    root.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, whole = root / name, root / f"{name}.whole"
        with FileLock(root / f"{name}.lock"):
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed in the middle
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return get


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A machine with a GPU of capability 8.9, TensorRT and TensorRT-RTX, all of them stand-ins."""
    from support.trtdouble import World, double_gpu, make_library

    from eagle_run.engine import graph_loading as load_graphs

    world = World()
    monkeypatch.setattr(load_graphs, "find_gpu", lambda: double_gpu(world.capability))
    monkeypatch.setattr(load_graphs, "need_gpu", lambda _: double_gpu(world.capability))
    monkeypatch.setattr(load_graphs, "find_library", lambda backend: make_library(world, backend))
    return world


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle that really decodes. Do not write into it."""
    from support.tinybundle import make_bundle

    return make_bundle(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of a tiny Llama."""
    from support.tiny import write_target

    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_head(tiny_target: Path) -> Path:
    """An EAGLE-3 head that is accepted often, with three quarters of the vocabulary."""
    from support.tiny import write_head

    return write_head(tiny_target.parent / "head", tiny_target, draft_vocab=60)


@pytest.fixture(scope="session")
def random_head(tiny_target: Path) -> Path:
    """An EAGLE-3 head that knows nothing."""
    from support.tiny import write_head

    return write_head(tiny_target.parent / "random", tiny_target, good=False)


@pytest.fixture(scope="session")
def eagle1_head(tiny_target: Path) -> Path:
    """An EAGLE-1 head: no fuse graph, the target's own vocabulary and lm_head."""
    from support.tiny import write_head

    return write_head(tiny_target.parent / "eagle1", tiny_target, kind="eagle1")


@pytest.fixture(scope="session")
def built_bundle(tiny_target: Path, tiny_head: Path) -> Path:
    """A bundle of the tiny target and its good head, built by the pipeline. Do not write into it."""
    from support.tiny import build_bundle

    return build_bundle(tiny_target, tiny_head, tiny_target.parent / "bundles" / "built")


@pytest.fixture(scope="session")
def smollm2_bundle(
    request: pytest.FixtureRequest, made_once: Callable[[str, Callable[[Path], object]], Path]
) -> Path:
    """The demo bundle: the one given, one that is newer than the exporter's code, or else a new one."""
    given = request.config.getoption("--smollm2-bundle")
    if given is not None:
        return Path(given)
    built = ROOT / "bundles" / "smollm2-135m-eagle3" / "manifest.json"
    sources = [*ROOT.glob("eagle_export/**/*.py"), *ROOT.glob("recipes/**/*")]
    newest = max(path.stat().st_mtime for path in sources if path.is_file())
    if built.is_file() and built.stat().st_mtime > newest:
        return built.parent
    from eagle_export.pipeline.build import build
    from eagle_export.pipeline.options import BuildOptions
    from eagle_export.progress import Progress

    def make(folder: Path) -> None:
        build(BuildOptions(target="smollm2-135m", out=folder / "bundle"), Progress(quiet=True))

    return made_once("smollm2-135m-eagle3", make) / "bundle"


@pytest.fixture(scope="session")
def smollm2_fp8(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The demo bundle in fp8, calibrated on a few short answers. Do not write into it."""
    from eagle_export.pipeline.build import build
    from eagle_export.pipeline.options import BuildOptions, Fp8Options
    from eagle_export.progress import Progress

    def make(folder: Path) -> None:
        prompts = folder / "prompts.jsonl"
        texts = ("Name three trees.", "What is 17 + 25?", "Write a line of Python that sorts a list.")
        prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
        options = BuildOptions(
            target="smollm2-135m",
            precision="fp8",
            fp8=Fp8Options(prompts=prompts),
            measure=False,
            out=folder / "bundle",
        )
        build(options, Progress(quiet=True))

    return made_once("smollm2-135m-fp8", make) / "bundle"
