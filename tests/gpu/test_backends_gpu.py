"""Compiled backends on a GPU against ONNX Runtime on the CPU: a bundle answers alike, or differs by a tie."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import request_of, run

from eagle_run.decoding.tree import TreeShape
from eagle_run.params import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = ("a small tree", "the sea at night", "ten apples")
TREES = (TreeShape.plain(), TreeShape.chain(2), TreeShape.dynamic(3, 3, 10))


def answers(engine: Any, shape: TreeShape, sampling: SamplingParams) -> list[list[int]]:
    requests = [request_of(engine, p, sampling=sampling, max_new_tokens=16, ignore_eos=True) for p in PROMPTS]
    return run(engine, requests, shape).tokens


def check(engine: Any, reference: Any) -> None:
    """Trees against this engine's own plain decoding; that against the reference, on the engine's terms."""
    from eagle_run.bench.mismatch import find_mismatch

    for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_p=0.9, seed=4)):
        plain = answers(engine, TREES[0], sampling)
        pairs = [(plain, answers(engine, shape, sampling)) for shape in TREES for _ in range(2)]
        pairs.append((plain, answers(reference, TREES[0], sampling)))
        requests = [
            request_of(engine, p, sampling=sampling, max_new_tokens=16, ignore_eos=True) for p in PROMPTS
        ]
        for one, other in pairs:
            for request, a, b in zip(requests, one, other, strict=True):
                found = find_mismatch(engine, request.offline, a, b)
                assert found is None or found.tie, found


@pytest.mark.parametrize("batch", [1, 3])
def test_onnxruntime_on_the_gpu(built_bundle: Path, batch: int) -> None:
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip(f"onnxruntime {ort.__version__} has no CUDA provider: needs onnxruntime-gpu")
    from eagle_run.engine.loading import load_engine

    engine = load_engine(built_bundle, backend="onnxruntime", device="cuda", batch=batch)
    assert engine.device.startswith("cuda")
    check(engine, load_engine(built_bundle, device="cpu", backend="onnxruntime"))


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt-rtx"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The tiny bundle in fp16, with engines for this GPU; made only where the library and a GPU are."""
    backend = request.param
    pytest.importorskip(backend.replace("-", "_"))
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    target, head = (request.getfixturevalue(name) for name in ("tiny_target", "tiny_head"))
    from support.tiny import build_bundle

    folder = tmp_path_factory.mktemp("compiled")
    bundle = build_bundle(target, head, folder / "source", precision="fp16")
    made = shutil.copytree(bundle, folder / "bundle")
    command = [sys.executable, "-m", "eagle_export", "compile", str(made), "--backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made, backend


@pytest.mark.parametrize("batch", [1, 3])
def test_engines(compiled: tuple[Path, str], batch: int) -> None:
    from eagle_run.engine.loading import load_engine

    bundle, backend = compiled
    engine = load_engine(bundle, backend=backend, batch=batch)
    assert engine.backend == backend
    check(engine, load_engine(bundle, backend="onnxruntime", device="cpu"))
    assert engine.cuda_graphs.replays > 0  # engines were captured with the rest of the round
