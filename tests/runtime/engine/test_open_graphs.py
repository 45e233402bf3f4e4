"""Which backend, device and files are chosen, and what is said where the choice cannot be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tinybundle import make_bundle
from support.trtdouble import World, add_engines

from eagle_run.backends.gpu import find_gpu
from eagle_run.backends.padding import PaddedGraph
from eagle_run.bundle.engine_backends import compile_command
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.engine import graph_loading as opening
from eagle_run.engine.graph_loading import load_graphs
from eagle_run.engine.loading import load_engine
from eagle_run.errors import EagleError, UsageError


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundles") / "bare")


@pytest.fixture
def root(bare: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bare, tmp_path / "tiny"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def opened(bundle: Bundle, **options: Any) -> tuple[str, str, list[str]]:
    said: list[str] = []
    found = load_graphs(bundle, threads=1, log=said.append, **options)
    assert set(found.graphs) == {"target", "draft"}
    return found.backend, found.precision, said


def test_engines_for_this_gpu_are_taken(root: Path, world: World) -> None:
    add_engines(root, "tensorrt-rtx", ("8.9", "12.0"), precision="fp16")
    assert opened(load_bundle(root)) == ("tensorrt-rtx", "fp16", [])
    add_engines(root, "tensorrt", ("8.9",), precision="fp8")
    assert opened(load_bundle(root)) == ("tensorrt", "fp8", [])  # compiled on this very GPU
    assert opened(load_bundle(root), backend="tensorrt-rtx") == ("tensorrt-rtx", "fp16", [])
    assert opened(load_bundle(root), device="cpu") == ("onnxruntime", "fp32", [])
    assert opened(load_bundle(root), backend="onnxruntime") == ("onnxruntime", "fp32", [])


def test_what_runs_is_what_is_reported(root: Path, world: World) -> None:
    add_engines(root, "tensorrt", precision="fp8")
    engine = load_engine(root)
    assert (engine.backend, engine.runner.precision, engine.device) == ("tensorrt", "fp8", "cpu")
    assert isinstance(engine.runner.graphs["target"], PaddedGraph)
    engine = load_engine(root, device="cpu", threads=1)
    assert (engine.backend, engine.runner.precision, engine.device) == ("onnxruntime", "fp32", "cpu")


def test_an_exact_engine_goes_before_a_compatible_one(root: Path, world: World) -> None:
    add_engines(root, "tensorrt", ("8.0",), hardware_compatibility="ampere_plus", precision="fp16")
    assert opened(load_bundle(root))[1] == "fp16"
    add_engines(root, "tensorrt", ("8.9",), precision="bf16")
    assert opened(load_bundle(root))[1] == "bf16"


def test_a_gpu_that_is_not_used_is_mentioned(root: Path, world: World) -> None:
    backend, _, (note,) = opened(load_bundle(root))
    assert backend == "onnxruntime"
    assert "Stand-in RTX is not used" in note
    assert "eagle-export compile BUNDLE --backend tensorrt" in note
    add_engines(root, "tensorrt-rtx", ("12.0",))
    add_engines(root, "tensorrt", ("9.0",))
    backend, _, (note,) = opened(load_bundle(root))
    assert backend == "onnxruntime"
    assert "engines are for compute capability 12.0, 9.0, and Stand-in RTX has 8.9" in note


def test_a_library_that_is_not_installed(root: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add_engines(root)

    def absent(backend: str) -> None:
        raise EagleError(f"{backend} is not installed", hint="pip install it")

    monkeypatch.setattr(opening, "find_library", absent)
    backend, _, (note,) = opened(load_bundle(root))
    assert backend == "onnxruntime"
    assert "engines for this GPU cannot be used: tensorrt-rtx is not installed" in note
    with pytest.raises(EagleError, match="tensorrt-rtx is not installed"):
        opened(load_bundle(root), backend="tensorrt-rtx")


def test_engines_for_other_gpus_only(root: Path, world: World) -> None:
    add_engines(root, "tensorrt-rtx", ("8.6", "12.0"))
    with pytest.raises(
        EagleError, match=r"no target graph for tensorrt-rtx for compute capability 8\.9"
    ) as e:
        opened(load_bundle(root), backend="tensorrt-rtx")
    assert "tensorrt-rtx for 8.6 and 12.0" in e.value.message
    assert "`eagle-export compile BUNDLE --backend tensorrt-rtx --target-arch sm89`" in e.value.hint


def test_engines_of_some_graphs_only(root: Path, world: World) -> None:
    """Target and draft run in one backend; plain decoding takes an engine of the target alone."""
    add_engines(root)
    manifest = json.loads((root / "manifest.json").read_text())
    kept = [a for a in manifest["artifacts"] if a["backend"] == "onnx" or a["graph"] == "target"]
    manifest["artifacts"] = kept
    (root / "manifest.json").write_text(json.dumps(manifest))
    bundle = load_bundle(root)
    assert opened(bundle)[0] == "onnxruntime"
    assert load_graphs(bundle, with_draft=False).backend == "tensorrt-rtx"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_no_gpu(root: Path, backend: str) -> None:
    add_engines(root, backend)
    bundle = load_bundle(root)
    assert opened(bundle) == ("onnxruntime", "fp32", [])
    with pytest.raises(EagleError, match=f"{backend} needs an NVIDIA GPU") as caught:
        opened(bundle, backend=backend)
    assert "the device cpu" in caught.value.hint
    with pytest.raises(EagleError, match="the device cuda needs an NVIDIA GPU"):
        opened(bundle, device="cuda")


@pytest.mark.usefixtures("no_gpu")
def test_torch_with_cuda_but_no_driver(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(EagleError, match=r"torch \(for CUDA 13\.0\) finds none") as caught:
        opened(load_bundle(root), device="cuda")
    assert "nvidia-smi" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "abacus"}, "unknown backend 'abacus'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"backend": "tensorrt", "device": "cpu"}, "tensorrt runs on a GPU, not on the device cpu"),
    ],
)
def test_options_that_make_no_sense(bare: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_graphs(load_bundle(bare), **options)  # type: ignore[arg-type]


def test_the_gpu_that_torch_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 17

    for name, value in {
        "is_available": True,
        "current_device": 1,
        "get_device_capability": (12, 0),
        "get_device_name": "A GPU",
        "current_stream": Stream(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    gpu = find_gpu()
    assert gpu is not None
    assert (str(gpu.device), gpu.capability, gpu.name, gpu.stream()) == ("cuda:1", "12.0", "A GPU", 17)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_hopper_is_compiled_for_by_tensorrt(backend: str) -> None:
    """TensorRT-RTX does not list it, so advice must not name it."""
    assert (
        compile_command(backend, "9.0") == "`eagle-export compile BUNDLE --backend tensorrt` on that machine"
    )
