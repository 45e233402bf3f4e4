"""Every precision and graph compiles for two architectures, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.enginemaker import ADA, BLACKWELL, LAYERS, LIMITS, TREE, Graphs

from eagle_export.engines.compile import compile_engine, weight_bytes
from eagle_export.engines.profiles import choose_profiles
from eagle_export.engines.request import EngineSettings
from eagle_run.bundle.loading import load_bundle
from eagle_run.bundle.records import LayerSummary

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rtx")]

CACHED = {"target": LAYERS, "draft": 1, "fuse": 0}
PRODUCTS = {"target": 4 * LAYERS + 1, "draft": 5, "fuse": 1}


def layers_of(engine: Any) -> dict[str, LayerSummary]:
    assert all(profile.layers for profile in engine.info.profiles)
    return {profile.name: profile.layers for profile in engine.info.profiles}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("graph", ["target", "draft", "fuse"])
def test_a_graph_becomes_an_engine(
    graph: str, precision: str, graphs: Callable[[str], Graphs], tmp_path: Path
) -> None:
    seen: list[tuple[float, str]] = []
    out = tmp_path / "engines" / f"{graph}.engine"
    request = graphs(precision).request(graph, out)
    engine = compile_engine(request, lambda share, what: seen.append((share, what)))

    assert engine.path == out
    assert engine.file_bytes == out.stat().st_size > 10_000
    assert [path.name for path in out.parent.iterdir()] == [out.name]  # no lock, no part
    assert engine.capabilities == (ADA, BLACKWELL)
    assert engine.library_version.startswith("tensorrt-rtx 1.")
    assert engine.warnings == ()
    assert (engine.info.attention_layers, engine.info.cache_updates) == (CACHED[graph], 2 * CACHED[graph])
    assert engine.info.seconds > 0
    assert engine.info.peak_memory_bytes > engine.file_bytes
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1

    assert [profile.axes for profile in engine.info.profiles] == [p.axes for p in request.profiles]
    for name, layers in layers_of(engine).items():
        assert sum(layers.attention.values()) == CACHED[graph], name
        assert layers.gemms == {precision: PRODUCTS[graph]}, name
        assert layers.kernels >= PRODUCTS[graph]
        assert layers.scratch_bytes > 0


def test_plain_decoding_has_its_own_attention_kernel(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    """What the profile plain is for."""
    request = graphs("fp16").request("target", tmp_path / "e", names=("verify", "plain"))
    found = layers_of(compile_engine(request))
    assert found["verify"].attention == {"_gemm_mha_v2": LAYERS}
    assert found["plain"].attention == {"_gemv_mha_v1": LAYERS}


def test_profiles_share_one_copy_of_the_weights(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    """Two profiles in one engine take less than two engines with a profile each."""

    def size(*names: str) -> int:
        request = graphs("fp16").request("target", tmp_path / "e", names=names)
        return compile_engine(request).file_bytes

    assert size("prefill", "verify") < size("prefill") + size("verify")


def test_an_eagle1_head_compiles(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    tiny = graphs("fp16-eagle1")
    assert set(tiny.specs) == {"target", "draft"}  # no fuse graph
    engine = compile_engine(tiny.request("draft", tmp_path / "e"))
    assert (engine.info.attention_layers, engine.info.cache_updates) == (1, 2)
    assert all(layers.attention == {"_gemm_mha_v2": 1} for layers in layers_of(engine).values())


def test_fp32_compiles_with_a_note(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    engine = compile_engine(graphs("fp32").request("draft", tmp_path / "e"))
    assert len(engine.warnings) == 1
    assert "no fused kernel" in engine.warnings[0]
    assert layers_of(engine)["draft"].attention == {}
    assert layers_of(engine)["draft"].gemms == {"fp32": 5}


def test_weight_only_fp8_is_visible(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    """Weights in FP8, activations not: it builds, but computes in 16 bit. The summary and a note say so."""
    import onnx

    tiny = graphs("fp8")
    model = onnx.load(tiny.folder / "fuse.onnx")
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    for node in [node for node in model.graph.node if node.op_type == "QuantizeLinear"]:
        product.input[0] = node.input[0]
    kept = [node for node in model.graph.node if node.op_type == "MatMul" or node.input[0] != "features"]
    kept = [node for node in kept if node.op_type != "DequantizeLinear" or node.output[0] in product.input]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, tmp_path / "fuse.onnx")
    request = tiny.request("fuse", tmp_path / "e", onnx=tmp_path / "fuse.onnx")
    engine = compile_engine(request)
    assert layers_of(engine)["fuse"].gemms == {"fp16xfp8": 1}
    assert len(engine.warnings) == 1
    assert "1 fp16xfp8" in engine.warnings[0]


def test_settings_reach_the_compiler(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    settings = EngineSettings((ADA,), optimization_level=0, workspace_mib=64)
    request = graphs("fp16").request("fuse", tmp_path / "e", settings=settings)
    assert compile_engine(request).capabilities == (ADA,)


def test_an_engine_replaces_an_older_one(graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    out = tmp_path / "e"
    out.write_bytes(b"old")
    engine = compile_engine(graphs("fp16").request("fuse", out))
    assert out.stat().st_size == engine.file_bytes > 3


@pytest.mark.real
def test_smollm2_for_one_profile_and_one_gpu(tmp_path: Path) -> None:
    """The demo target in fp16: at most a tenth larger than its weights, every product accounted for."""
    import torch

    from eagle_export.graphs.target import export_target
    from eagle_export.reference import recipe as recipes
    from eagle_export.reference.modules import load_modules

    modules = load_modules(recipes.resolve_target("smollm2-135m"), None, torch.float16)
    path = tmp_path / "target.onnx"
    rows = 2176
    spec = export_target(modules.target, path, cache_rows=rows)
    limits = LIMITS.model_copy(update={"max_seq_len": 2048, "prefill_chunk": 128, "cache_rows": rows})
    graphs = Graphs(tmp_path, {"target": spec}, "fp16")
    request = graphs.request(
        "target",
        tmp_path / "e",
        profiles=choose_profiles("target", limits, TREE, ("verify",)),
        settings=EngineSettings((ADA,)),
    )
    engine = compile_engine(request)
    assert engine.file_bytes <= 1.1 * weight_bytes(path)
    layers = layers_of(engine)["verify"]
    assert layers.attention == {"_gemm_mha_v2": 30}
    assert layers.gemms == {"fp16": 121}
    assert (engine.info.attention_layers, engine.info.cache_updates) == (30, 60)


@pytest.mark.real
def test_smollm2_in_fp8_for_one_profile_and_one_gpu(smollm2_fp8: Path, tmp_path: Path) -> None:
    """Every linear product in FP8, lm_head in 16 bit, and at most a fifth larger than the weights."""
    bundle = load_bundle(smollm2_fp8)
    limits = bundle.manifest.limits
    specs = {name: bundle.artifact(name).spec() for name in ("target", "draft", "fuse")}
    graphs = Graphs(smollm2_fp8 / "onnx", specs, "fp8")
    request = graphs.request(
        "target",
        tmp_path / "e",
        profiles=choose_profiles("target", limits, bundle.manifest.tree, ("verify",)),
        settings=EngineSettings((ADA,)),
    )
    engine = compile_engine(request)
    assert engine.file_bytes <= 1.2 * weight_bytes(smollm2_fp8 / "onnx/target.onnx")
    layers = layers_of(engine)["verify"]
    assert layers.gemms == {"fp8": 120, "fp16": 1}
    assert sum(layers.attention.values()) == 30
    for graph, gemms in (("draft", {"fp8": 4, "fp16": 1}), ("fuse", {"fp16": 1})):  # lm_head, and fc
        profiles = choose_profiles(graph, limits, bundle.manifest.tree)
        engine = compile_engine(graphs.request(graph, tmp_path / graph, profiles=profiles))
        assert all(found.gemms == gemms for found in layers_of(engine).values())
