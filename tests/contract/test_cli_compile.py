"""From the command line to engines: `build --backend tensorrt-rtx`, `compile`, `build --plan`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.exportcli import Cli, fails, holding, leftovers
from support.tiny import Sizes, write_head, write_target

import eagle_export.pipeline.compile
from eagle_export.cli.main import run
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.engine.loading import load_engine
from eagle_run.errors import EagleError

SMALL = ("--max-seq-len", "64", "--prefill-chunk", "16", "--max-tree-nodes", "16", "--max-batch", "2")
TREE = ("--tree", "dynamic", "--depth", "2", "--branch", "2", "--nodes", "4")
SIZES = Sizes(hidden=64, heads=4, kv_heads=2, inner=96, layers=2)  # heads of 16, which TensorRT fuses
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install 'eagle-export[rtx]'",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A target and a head of it, as options."""
    folder = tmp_path_factory.mktemp("model")
    target = write_target(folder / "target", SIZES)
    head = write_head(folder / "head", target, layer_ids=(0,))
    return "--target", str(target), "--head", str(head), *SMALL, *TREE


@pytest.fixture(scope="module")
def half(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in fp16 without engines. Do not write into it."""
    out = tmp_path_factory.mktemp("half") / "bundle"
    assert run(["build", *model, "--precision", "fp16", "--no-measure", "--out", str(out)]) == 0
    return out


def engines(bundle: Bundle) -> dict[str, Any]:
    return {a.graph: a for a in bundle.manifest.artifacts if a.backend == "tensorrt-rtx"}


@pytest.mark.slow
@needs_rtx
def test_a_build_in_fp8_has_engines_scales_and_figures(
    cli: Cli, model: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "b"
    command = ["build", *model, "--precision", "fp8", "--backend", "tensorrt-rtx", "--target-arch", "sm89"]
    outcome = cli(*command, "--out", out)
    assert outcome.code == 0, outcome
    assert "compile target for sm89" in outcome.err
    bundle = load_bundle(out)
    manifest = bundle.manifest
    assert manifest.quantization is not None
    assert (manifest.quantization.source, manifest.quantization.base) == ("calibrated", "fp16")
    assert manifest.accuracy is not None
    assert 0 < manifest.accuracy.top1_agreement <= 1
    made = engines(bundle)
    assert set(made) == {"target", "fuse", "draft"}
    target = made["target"]
    assert target.file == "engines/target.tensorrt-rtx-sm89.engine"
    assert target.compute_capabilities == ("8.9",)
    assert [profile.name for profile in target.engine.profiles] == ["prefill", "verify"]
    for profile in target.engine.profiles:
        assert profile.layers.gemms["fp8"] == 4 * SIZES.layers
        assert sum(profile.layers.attention.values()) == SIZES.layers
    assert (target.engine.attention_layers, target.engine.cache_updates) == (SIZES.layers, 2 * SIZES.layers)
    assert holding(out, tmp_path, model[1], Path.cwd()) == {}  # an engine is shipped too
    shown = cli("inspect", out)
    assert "8 fp8" in shown.out
    assert "tensorrt-rtx" in shown.out
    kept = cli("build", *model, "--precision", "fp8", "--no-measure", "--keep-16bit", "*.down_proj",
               "--out", tmp_path / "kept", "--scales", out / "fp8_scales.json")  # fmt: skip
    assert kept.code == 0, kept
    back = cli("build", *model, "--precision", "fp8", "--no-measure", "--quantize-lm-head",
               "--out", tmp_path / "back", "--scales", tmp_path / "kept/fp8_scales.json")  # fmt: skip
    assert back.code == 0, back  # the file has all scales, whatever was chosen
    counts = [load_bundle(tmp_path / name).manifest.quantization.linears for name in ("kept", "back")]  # type: ignore[union-attr]
    assert counts == [manifest.quantization.linears - 3, manifest.quantization.linears + 2]
    again = cli(*command, "--no-measure", "--scales", out / "fp8_scales.json", "--out", tmp_path / "again")
    assert again.code == 0, again
    assert "calibrate" not in again.err
    same = [(out / "onnx" / f"{g}.onnx.data").read_bytes() for g in ("target", "draft")]
    assert same == [(tmp_path / "again/onnx" / f"{g}.onnx.data").read_bytes() for g in ("target", "draft")]
    plain = load_engine(out)  # a machine without a GPU still decodes with the graphs
    assert plain.runner.precision == "fp8"


@pytest.mark.slow
@needs_rtx
def test_compile_adds_engines_and_keeps_everything_else(cli: Cli, half: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    shutil.copytree(half, bundle)
    graph = (bundle / "onnx/target.onnx.data").read_bytes()
    (bundle / "engines").mkdir()
    (bundle / "engines/runtime.cache").write_text("mine")
    bundle.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(bundle)
    outcome = cli("compile", link, "--backend", "tensorrt-rtx", "--target-arch", "sm89", "--json")
    assert outcome.code == 0, outcome
    assert len(json.loads(outcome.out)["engines"]) == 3
    assert (bundle / "onnx/target.onnx.data").read_bytes() == graph
    assert (bundle / "engines/runtime.cache").read_text() == "mine"
    assert bundle.stat().st_mode & 0o777 == 0o700
    assert link.is_symlink()
    first = load_bundle(bundle)
    outcome = cli(
        "compile", bundle, "--backend", "tensorrt-rtx", "--target-arch", "8.9", "--profiles", "verify,draft"
    )
    assert outcome.code == 0, outcome
    second = load_bundle(bundle)  # engines of the same GPUs were replaced
    assert len(second.manifest.artifacts) == len(first.manifest.artifacts) == 6
    assert [p.name for p in engines(second)["target"].engine.profiles] == ["verify"]
    other = tmp_path / "other"
    outcome = cli("compile", bundle, "--backend", "tensorrt-rtx", "--target-arch", "sm120", "--out", other)
    assert outcome.code == 0, outcome
    assert len(load_bundle(other).manifest.artifacts) == 9
    assert len(load_bundle(bundle).manifest.artifacts) == 6
    assert second.manifest.model_copy(update={"artifacts": (), "created": ""}) == first.manifest.model_copy(
        update={"artifacts": (), "created": ""}
    )
    assert leftovers(tmp_path) == ["b", "link", "other"]


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("fault", [EagleError("the compiler gave up", hint="try again"), KeyboardInterrupt()])
def test_a_compile_that_ends_early_leaves_the_bundle_and_is_gone_on_from(
    cli: Cli, half: Path, tmp_path: Path, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "b"
    shutil.copytree(half, bundle)
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    compile_one = eagle_export.pipeline.compile.compile_engine
    done: list[str] = []

    def compile_engine(request: Any, update: Any) -> Any:
        if request.graph == "draft" and "draft" not in done:
            done.append("draft")
            raise fault
        done.append(request.graph)
        return compile_one(request, update)

    monkeypatch.setattr(eagle_export.pipeline.compile, "compile_engine", compile_engine)
    outcome = cli("compile", bundle, "--backend", "tensorrt-rtx", "--target-arch", "sm89")
    assert outcome.code == (130 if isinstance(fault, KeyboardInterrupt) else 1)
    assert "target" in done
    assert "finished parts are kept" in outcome.err
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    assert leftovers(tmp_path) == ["b", "b.partial"]
    outcome = cli("compile", bundle, "--backend", "tensorrt-rtx", "--target-arch", "sm89")
    assert outcome.code == 0, outcome
    assert "compile target for sm89: taken over" in outcome.err
    assert done.count("target") == 1
    assert leftovers(tmp_path) == ["b"]
    assert len(engines(load_bundle(bundle))) == len(load_bundle(half).manifest.artifacts)
    assert not (bundle / "journal.json").exists()


def test_what_has_no_graphs_cannot_be_compiled(cli: Cli, half: Path, tmp_path: Path) -> None:
    command = ["--backend", "tensorrt-rtx", "--target-arch", "sm89"]
    fails(cli("compile", tmp_path / "none", *command), 1, "is not a bundle")
    fails(cli("compile", half, *command, "--out", half), 2, "the bundle itself")
    fails(cli("compile", half, *command, "--out", half / "sub"), 2, "inside it")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    fails(cli("compile", half, *command, "--out", tmp_path / "full"), 1, "already exists")
    fails(cli("compile", half, "--backend", "tensorrt-rtx", "--profiles", "fast"), 2, "fast")
    fails(cli("compile", half), 2, "--backend")
    fails(cli("compile", half, "--backend", "onnxruntime"), 2, "onnxruntime")


def test_a_plan_builds_nothing(cli: Cli, model: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "b"
    command = ["build", *model, "--out", out, "--plan", "--backend", "tensorrt-rtx", "--precision", "fp8"]
    table, data = cli(*command), cli(*command, "--json")
    assert (table.code, data.code) == (0, 0), (table, data)
    assert "target engine" in table.out
    found = json.loads(data.out)
    assert found["steps"]["compile"]["memory_bytes"] > 0
    assert set(found["graphs"]) == {"target", "fuse", "draft"}
    assert leftovers(tmp_path) == []
