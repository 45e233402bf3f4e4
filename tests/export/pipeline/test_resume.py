"""What the journal is told of graphs, scales and engines is what comes out of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.bundlewriting import fill, spec

import eagle_export.pipeline.compile
import eagle_export.pipeline.quantization
from eagle_export.checkpoints.fp8_scales import Scales
from eagle_export.engines.request import CompiledEngine, EngineRequest
from eagle_export.pipeline.compile import compile_graphs
from eagle_export.pipeline.options import EngineOptions
from eagle_export.pipeline.partial import Partial
from eagle_export.pipeline.quantization import Quantization
from eagle_export.pipeline.resume import recall_graph, record_graph, tool_identity
from eagle_export.pipeline.writer import BundleWriter
from eagle_export.progress import Progress
from eagle_export.quantize.fp8.rewrite import Quantized
from eagle_run.bundle.manifest import Limits, TreeDefaults
from eagle_run.bundle.records import EngineInfo, EngineProfile
from eagle_run.errors import EagleError

SCALES = Scales({"target": {"model.layers.0.mlp.up_proj": 0.1}}, {"target": 3.7}, 99, kept=("lm_head",))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def journal(place: Path) -> Partial:
    opened = Partial(place, {"target": "a"})
    opened.enter()
    return opened


def test_a_graph_comes_back_with_its_signature_and_what_was_quantised(tmp_path: Path) -> None:
    first = journal(tmp_path / "b")
    files = [first.folder / "onnx" / name for name in ("target.onnx", "target.onnx.data")]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(b"x")
    did = Quantized(2, ("model.layers.0.mlp.up_proj",), ("lm_head",))
    record_graph(first, spec("target"), files, Quantization(SCALES, SCALES, None, {"target": did}))
    first.leave(keep=True)
    second, quantization = journal(tmp_path / "b"), Quantization(SCALES, SCALES, None)
    assert recall_graph(second, "target", quantization) == spec("target")
    assert quantization.done == {"target": did}
    assert recall_graph(second, "draft", quantization) is None
    second.leave(keep=False)


def test_scales_come_back_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_export.pipeline.quantization, "_calibrate", lambda *_: SCALES)
    first = journal(tmp_path / "b")
    nothing: Any = None
    assert eagle_export.pipeline.quantization._calibrated(nothing, tmp_path, nothing, first) == SCALES
    first.leave(keep=True)
    monkeypatch.setattr(
        eagle_export.pipeline.quantization, "_calibrate", lambda *_: pytest.fail("calibrated again")
    )
    second = journal(tmp_path / "b")
    assert eagle_export.pipeline.quantization._calibrated(nothing, tmp_path, nothing, second) == SCALES
    second.leave(keep=False)


class Compiler:
    """In the place of `compile_engine`: fails at a graph."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.compiled: list[str] = []

    def __call__(self, request: EngineRequest, _: Any) -> CompiledEngine:
        if request.graph == self.fails:
            raise EagleError("the compiler gave up")
        self.compiled.append(request.graph)
        request.out.write_bytes(f"engine of {request.graph}".encode())
        info = EngineInfo(
            profiles=tuple(EngineProfile(name=p.name, axes=p.axes) for p in request.profiles),
            attention_layers=1,
            cache_updates=2,
            seconds=0.1,
            peak_memory_bytes=10**9,
        )
        return CompiledEngine(request.out, 1, info, "tensorrt-rtx 1.7.1", request.settings.capabilities)


def compiled(place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The artifacts of a bundle with engines, as the last steps of a build make it."""
    monkeypatch.setattr(eagle_export.pipeline.compile, "compile_engine", compiler)
    engine = EngineOptions(backend="tensorrt-rtx", target_arch=("sm89",), **options)
    with BundleWriter(place, identity={"target": "a"}) as writer:
        rest = fill(writer)
        writer.keep()
        limits, tree = Limits.model_validate(rest["limits"]), TreeDefaults.model_validate(rest["tree"])
        compile_graphs(writer, limits, tree, engine, Progress(quiet=True))
        return writer.artifacts


@pytest.mark.parametrize(
    ("more", "again"),
    [
        ({}, ["fuse", "draft"]),
        ({"optimization_level": 1}, ["target", "fuse", "draft"]),  # what was compiled is of another kind
        ({"profiles": ("verify", "draft")}, ["target", "fuse", "draft"]),
    ],
)
def test_engines_are_taken_over_if_they_would_be_compiled_alike(
    more: dict[str, Any], again: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs pip install 'eagle-export[rtx]'")
    with pytest.raises(EagleError, match="gave up"):
        compiled(tmp_path / "b", Compiler(fails="fuse"), monkeypatch)
    assert (tmp_path / "b.partial").is_dir()
    compiler = Compiler()
    artifacts = compiled(tmp_path / "b", compiler, monkeypatch, **more)
    assert compiler.compiled == again
    assert artifacts == compiled(tmp_path / "whole", Compiler(), monkeypatch, **more)


def test_the_tool_is_known_by_its_code() -> None:
    found = tool_identity()
    assert found == tool_identity()
    assert len(found["code"]) == 64
    assert {"eagle-export", "python", "torch", "onnx"} <= set(found)
