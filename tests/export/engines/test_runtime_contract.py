"""The TensorRT backend against the real library, as far as that goes without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import trtcontext, trtdouble, trtworld
from support.decoding import request_of, run
from support.trtdouble import World, write_engine

from eagle_export.pipeline.compile import compile_bundle
from eagle_export.pipeline.options import EngineOptions
from eagle_export.progress import Progress
from eagle_run.backends.engine_checks import check_header
from eagle_run.backends.tensorrt import make_log
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.loading import load_engine
from eagle_run.errors import EagleError

ENUMS = (
    trtworld.DataType,
    trtworld.TensorIOMode,
    trtworld.TensorLocation,
    trtworld.ExecutionContextAllocationStrategy,
    trtworld.DynamicShapesKernelSpecializationStrategy,
    trtworld.CudaGraphStrategy,
    trtworld.EngineValidity,
    trtworld.EngineInvalidityDiagnostics,
)
CLASSES = {
    "Runtime": trtdouble.RtxRuntime,
    "ICudaEngine": trtdouble.ICudaEngine,
    "IExecutionContext": trtcontext.RtxExecutionContext,
    "IRuntimeConfig": trtcontext.IRuntimeConfig,
    "IRuntimeCache": trtcontext.IRuntimeCache,
    "ILogger": trtworld.ILogger,
}


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_enums_are_the_librarys(rtx: Any, enum: Any) -> None:
    real = getattr(rtx.module, enum.__name__).__members__
    assert {name: int(real[name]) for name in enum.__members__} == {
        name: int(member.value) for name, member in enum.__members__.items()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_everything_that_the_stand_in_has_is_in_the_library(rtx: Any, name: str) -> None:
    """The backend runs on the stand-in, so it uses nothing else."""
    double, real = CLASSES[name], getattr(rtx.module, name)
    used = {name for name in dir(double) if not name.startswith("_")}
    assert used
    assert not {name for name in used if not hasattr(real, name)}


@pytest.fixture(scope="module")
def compiled(built_bundle: Path, tmp_path_factory: pytest.TempPathFactory, rtx: Any) -> Bundle:
    """Target, fuse and draft as engines of the real compiler."""
    out = tmp_path_factory.mktemp("compiled") / "bundle"
    return compile_bundle(built_bundle, EngineOptions(backend="tensorrt-rtx"), Progress(quiet=True), out=out)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, so nothing is refused")
def test_without_a_driver_the_reason_is_the_librarys(rtx: Any, compiled: Bundle) -> None:
    """In a process of its own, as the real runtime is loaded here."""
    file = compiled.file(compiled.artifact("target", "tensorrt-rtx", "8.9"))
    code = (
        "import sys; from eagle_run.backends.library import find_library\n"
        "from eagle_run.backends.tensorrt import make_log\n"
        "from eagle_run.backends.engine_checks import check_header\n"
        "library = find_library('tensorrt-rtx'); log = make_log(library.module)\n"
        "runtime = library.module.Runtime(log)\n"
        "header = open(sys.argv[1], 'rb').read(runtime.engine_header_size)\n"
        "check_header(library, runtime, header, 'x.engine', log)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False, timeout=120
    )
    assert "EagleError: x.engine: tensorrt-rtx" in ended.stderr
    assert "CUDA driver version is insufficient" in ended.stderr


def test_a_file_that_is_no_engine(rtx: Any) -> None:
    log = make_log(rtx.module)
    runtime = rtx.module.Runtime(log)
    with pytest.raises(EagleError, match="refuses this engine: malformed engine"):
        check_header(rtx, runtime, b"\0" * runtime.engine_header_size, "x.engine", log)


def test_the_log_keeps_errors_and_nothing_else(rtx: Any) -> None:
    log = make_log(rtx.module)
    kinds = rtx.module.ILogger
    log.log(kinds.WARNING, "a warning")
    log.log(kinds.INFO, "something")
    assert log.last == ""
    log.log(kinds.ERROR, "first")
    log.log(kinds.INTERNAL_ERROR, "second")
    log.log(kinds.VERBOSE, "third")
    assert log.last == "second"


@pytest.mark.slow
def test_a_real_manifest_decodes(compiled: Bundle, world: World, tmp_path: Path) -> None:
    """Profiles and signatures are the real compiler's; only what runs is stood in for."""
    import hashlib
    import shutil

    root = Path(shutil.copytree(compiled.path, tmp_path / "bundle"))
    manifest = json.loads((root / "manifest.json").read_text())
    for entry in manifest["artifacts"]:
        if entry["engine"] is None:
            continue
        artifact = compiled.artifact(entry["graph"], "tensorrt-rtx", "8.9")
        file = root / entry["file"]
        write_engine(file, artifact, root / f"onnx/{entry['graph']}.onnx", scratch=5000)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entry["files"] = [{"path": entry["file"], "bytes": file.stat().st_size, "sha256": digest}]
    (root / "manifest.json").write_text(json.dumps(manifest))

    engine = load_engine(root)
    expected = load_engine(root, device="cpu", threads=1)
    assert (engine.backend, expected.backend) == ("tensorrt-rtx", "onnxruntime")
    assert set(engine.runner.graphs) == {"target", "fuse", "draft"}
    requests = [request_of(engine, text, max_new_tokens=16) for text in ("one two", "three")]
    for shape in (TreeShape.plain(), TreeShape.dynamic(3, 3, 8)):
        assert run(engine, requests, shape).token_ids == run(expected, requests, shape).token_ids
    assert load_bundle(root).manifest.artifacts == engine.bundle.manifest.artifacts
