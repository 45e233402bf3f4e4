"""Estimates against real builds (sizes and memory, within stated factors), and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import Sizes, build_bundle, write_head, write_target

from eagle_export.pipeline.estimate import Estimate, Memory, estimate, memory_here
from eagle_export.pipeline.sizes import GraphWeights, weigh_bundle, weigh_checkpoints, width_of
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.errors import EagleError

GB = 10**9
SIZES = Sizes(vocab=400, layers=4, hidden=64, heads=4, kv_heads=2, inner=96)  # heads of 16: they fuse


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("estimate") / "target", SIZES)


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    return write_head(target.parent / "head", target, draft_vocab=200)


@pytest.fixture(scope="module")
def eagle1(target: Path) -> Path:
    return write_head(target.parent / "eagle1", target, kind="eagle1")


@pytest.fixture(scope="module")
def bundle(target: Path, head: Path) -> Bundle:
    return load_bundle(build_bundle(target, head, target.parent / "fp16", precision="fp16", measure=False))


def onnx_bytes(bundle: Bundle) -> dict[str, int]:
    return {a.graph: sum(file.bytes for file in a.files) for a in bundle.manifest.artifacts}


@pytest.mark.slow
def test_graphs_are_as_large_as_estimated(target: Path, head: Path, bundle: Bundle) -> None:
    weighed = weigh_checkpoints(target, head, "fp16")
    estimated = {graph.name: graph.onnx_bytes for graph in estimate(weighed, "fp16").graphs}
    built = onnx_bytes(bundle)
    assert list(estimated) == list(built) == ["target", "fuse", "draft"]
    for name, size in built.items():
        assert 0.9 * size < estimated[name] < 1.15 * size, name
    assert [graph.layers for graph in weighed] == [SIZES.layers, 0, 1]


def test_graphs_of_an_eagle1_head_hold_the_targets_matrices(
    target: Path, eagle1: Path, tmp_path: Path
) -> None:
    weighed = weigh_checkpoints(target, eagle1, "fp32")
    built = onnx_bytes(load_bundle(build_bundle(target, eagle1, tmp_path / "bundle", precision="fp32")))
    assert [graph.name for graph in weighed] == list(built) == ["target", "draft"]
    for graph in estimate(weighed, "fp32").graphs:
        assert 0.9 * built[graph.name] < graph.onnx_bytes < 1.1 * built[graph.name]


def test_no_head_means_one_graph(target: Path) -> None:
    (only,) = weigh_checkpoints(target, None, "fp32")
    stored = sum(tensor.nbytes for tensor in load_file(target / "model.safetensors").values())
    assert (only.name, only.bytes, only.fp32_bytes, only.read_bytes) == ("target", stored, stored, stored)


def linear_values() -> int:
    """Of all linear layers of the target, lm_head apart."""
    width = SIZES.hidden // SIZES.heads
    attention = SIZES.hidden * width * (2 * SIZES.heads + 2 * SIZES.kv_heads)
    return SIZES.layers * (attention + 3 * SIZES.hidden * SIZES.inner)


def test_fp8_halves_the_linear_layers_alone(target: Path) -> None:
    (half,) = weigh_checkpoints(target, None, "fp16")
    (quarter,) = weigh_checkpoints(target, None, "fp8")
    assert half.bytes - quarter.bytes == linear_values()
    (kept,) = weigh_checkpoints(target, None, "fp8", keep=["*.down_proj"])
    assert kept.bytes - quarter.bytes == SIZES.layers * SIZES.hidden * SIZES.inner
    (more,) = weigh_checkpoints(target, None, "fp8", lm_head=True)
    assert quarter.bytes - more.bytes == SIZES.vocab * SIZES.hidden


def test_a_matrix_that_is_stored_twice_counts_once(target: Path, tmp_path: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(target / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    (apart,), (tied,) = weigh_checkpoints(target, None, "fp32"), weigh_checkpoints(tmp_path, None, "fp32")
    assert apart.bytes - tied.bytes == tensors["lm_head.weight"].nbytes


def test_of_a_model_that_sees_the_language_part_counts(target: Path, head: Path, tmp_path: Path) -> None:
    """Under either of its names, without the vision tower; whether it is tied stands within."""
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    own = load_file(target / "model.safetensors")
    vision = {"vision_tower.layers.0.up_proj.weight": torch.ones(500, 400)}
    alone = [graph.bytes for graph in weigh_checkpoints(target, head, "fp32")]
    alone[0] -= own["lm_head.weight"].nbytes
    older = {f"language_model.{name}": tensor for name, tensor in own.items()}
    newer = {name.replace("model.", "model.language_model."): tensor for name, tensor in own.items()}
    for tensors in (older, newer):
        save_file(tensors | vision, tmp_path / "model.safetensors")
        found = weigh_checkpoints(tmp_path, head, "fp32")
        assert [graph.bytes for graph in found] == alone
        assert found[0].read_bytes > 500 * 400 * 4  # all of the file is read, to know whose it is


def test_names_inside_vllm_count_like_others(target: Path, head: Path, tmp_path: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**named, "verifier_norm.weight": torch.ones(999)}, tmp_path / "model.safetensors")
    found, plain = (weigh_checkpoints(target, folder, "fp8") for folder in (tmp_path, head))
    assert [(graph.name, graph.bytes, graph.layers) for graph in found] == [
        (graph.name, graph.bytes, graph.layers) for graph in plain
    ]


def test_a_tied_target_gives_an_eagle1_head_its_embedding_twice(
    target: Path, eagle1: Path, tmp_path: Path
) -> None:
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    draft = weigh_checkpoints(tmp_path, eagle1, "fp32")[-1]
    assert draft.bytes == weigh_checkpoints(target, eagle1, "fp32")[-1].bytes


def test_scales_and_vocabulary_maps_are_no_weights(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    scales = {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1), "d2t": torch.ones(9)}
    save_file({**tensors, **scales}, tmp_path / "model.safetensors")
    (with_scales,) = weigh_checkpoints(tmp_path, None, "fp8")
    assert with_scales.bytes == weigh_checkpoints(target, None, "fp8")[0].bytes


@pytest.mark.parametrize(("precision", "share"), [("fp32", 2), ("bf16", 1), ("fp8", 0.5)])
def test_bin_files_count_as_16_bit_weights(
    target: Path, tmp_path: Path, precision: str, share: float
) -> None:
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    (graph,) = weigh_checkpoints(tmp_path, None, precision)
    assert graph.bytes == 1000 * share
    assert graph.held_bytes == 0
    assert graph.loaded_bytes == 500 * width_of(precision)


@pytest.mark.slow
def test_engines_and_their_compiler_take_what_was_estimated(bundle: Bundle, tmp_path: Path) -> None:
    """Sizes within a fifth and memory within a third of a real compilation of several profiles."""
    pytest.importorskip("tensorrt_rtx", reason="needs pip install 'eagle-export[rtx]'")
    from eagle_export.pipeline.compile import compile_bundle
    from eagle_export.pipeline.options import EngineOptions
    from eagle_export.progress import Progress

    options = EngineOptions(backend="tensorrt-rtx", target_arch=("sm89",))
    compiled = compile_bundle(bundle.path, options, Progress(quiet=True), out=tmp_path / "compiled")
    engines = {a.graph: a for a in compiled.manifest.artifacts if a.engine is not None}
    profiles = {name: len(a.engine.profiles) for name, a in engines.items() if a.engine}
    assert sum(profiles.values()) > len(profiles)
    expected = estimate(weigh_bundle(bundle), "fp16", exports=False, profiles=profiles)
    for graph in expected.graphs:
        found = sum(file.bytes for file in engines[graph.name].files)
        assert 0.8 * found < graph.engine_bytes < 1.25 * found, graph.name
    peak = max(a.engine.peak_memory_bytes for a in engines.values() if a.engine)
    assert 0.67 * peak < expected.memory_bytes < 1.5 * peak
    assert list(expected.steps) == ["compile"]


WEIGHTS = (
    GraphWeights("target", 32, bytes=16 * GB, fp32_bytes=32 * GB, read_bytes=16 * GB, held_bytes=2 * GB),
    GraphWeights("draft", 1, bytes=2 * GB, fp32_bytes=4 * GB, read_bytes=1 * GB, held_bytes=1 * GB),
)


def test_every_step_adds_to_the_whole() -> None:
    export = estimate(WEIGHTS, "fp16")
    one = estimate(WEIGHTS, "fp16", profiles={"target": 1, "draft": 1})
    more = estimate(WEIGHTS, "fp16", profiles={"target": 3, "draft": 1})
    assert list(export.steps) == ["export"]
    assert 18 * GB < export.disk_bytes < 18.1 * GB
    assert 36 * GB < one.disk_bytes < more.disk_bytes < 36.2 * GB
    assert 2 * GB < export.memory_bytes < 3 * GB  # the largest weight
    assert one.memory_bytes == one.steps["compile"].memory_bytes > 3 * 16 * GB
    assert one.steps["compile"].seconds < more.steps["compile"].seconds
    calibrated = estimate(WEIGHTS, "fp16", calibrates=True)
    assert calibrated.memory_bytes > 36 * GB  # all of it in fp32
    assert calibrated.seconds > export.seconds
    measured = estimate(WEIGHTS, "fp16", measures=True)
    assert measured.memory_bytes > 2 * 36 * GB
    assert list(measured.steps) == ["export", "measure"]


def test_a_loaded_head_is_there_while_the_largest_weight_is_written() -> None:
    """torch's .bin files are loaded as a whole; of others only the largest weight of all counts."""
    loaded = GraphWeights("draft", 1, 2 * GB, 4 * GB, 2 * GB, loaded_bytes=2 * GB)
    light, heavy = (estimate([WEIGHTS[0], draft], "fp16").memory_bytes for draft in (WEIGHTS[1], loaded))
    assert heavy - light == 2 * GB


def test_linked_weights_take_no_room() -> None:
    target = GraphWeights("target", 32, 16 * GB, 32 * GB, 16 * GB, held_bytes=2 * GB, linked_bytes=15 * GB)
    written, linked = (estimate([target], "fp16", links=links) for links in (False, True))
    assert written.disk_bytes - linked.disk_bytes == 15 * GB
    assert linked.seconds < written.seconds
    assert written.memory_bytes - linked.memory_bytes == 2 * GB  # nothing large is read


def test_what_agrees_with_the_checkpoint_may_be_linked(target: Path, head: Path) -> None:
    """All but the small tensors, where types agree; nothing where they do not; never what is quantised."""
    stored = load_file(target / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    (same,) = weigh_checkpoints(target, None, "fp32")
    small = sum(tensor.nbytes for tensor in stored.values() if tensor.nbytes < 4096)
    assert same.linked_bytes == same.bytes - small > 0
    assert weigh_checkpoints(target, None, "fp16")[0].linked_bytes == 0
    assert all(graph.linked_bytes > 0 for graph in weigh_checkpoints(target, head, "fp32"))


def test_what_is_held_at_a_time(target: Path, eagle1: Path, tmp_path: Path) -> None:
    """The weights that are written as one: lm_head here, or gate and up, or the experts of a layer."""
    stored = load_file(target / "model.safetensors")
    assert stored["lm_head.weight"].nbytes > stored["model.layers.0.mlp.up_proj.weight"].nbytes
    graphs = weigh_checkpoints(target, eagle1, "fp32")  # the head holds the target's, as it has none
    assert [graph.held_bytes for graph in graphs] == [stored["lm_head.weight"].nbytes] * 2
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    layers = {name: torch.zeros(8, 4) for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    layers |= {f"mlp.experts.{i}.{name}_proj": torch.zeros(4, 4) for i in range(8) for name in ("up", "gate")}
    save_file(
        {f"model.layers.0.{name}.weight": tensor for name, tensor in layers.items()},
        tmp_path / "model.safetensors",
    )
    (graph,) = weigh_checkpoints(tmp_path, None, "fp16")
    assert graph.held_bytes == 2 * 8 * 4 * 4 * 4
    experts = {name for name in layers if "experts" in name}
    save_file(
        {f"model.layers.0.{name}.weight": layers[name] for name in layers.keys() - experts},
        tmp_path / "model.safetensors",
    )
    (graph,) = weigh_checkpoints(tmp_path, None, "fp16")
    assert graph.held_bytes == 2 * 8 * 4 * 4


def test_an_estimate_as_json_and_as_a_table() -> None:
    from rich.console import Console

    expected = estimate(WEIGHTS, "fp16", profiles={"target": 2})
    data = json.loads(json.dumps(expected.as_dict()))
    assert data["disk_bytes"] == expected.disk_bytes
    assert data["graphs"]["draft"]["engine_bytes"] == 0
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(expected.render())
    shown = captured.get()
    for words in ("target graph", "target engine", "draft graph", "16 GB", "export", "compile"):
        assert words in shown
    assert "draft engine" not in shown


def checked(needed: Estimate, *, available: float, total: float, free: float) -> tuple[str, ...]:
    memory = Memory(available=int(available * GB), total=int(total * GB))
    return needed.check(memory, int(free * GB), Path("bundles/x"))


def test_what_fits_passes_without_a_word() -> None:
    assert checked(estimate(WEIGHTS, "fp16"), available=64, total=64, free=20) == ()


def test_a_full_disk_is_refused_before_anything_starts() -> None:
    with pytest.raises(EagleError, match=r"bundles/x: about 18 GB are needed, 5\.0 GB are free") as caught:
        checked(estimate(WEIGHTS, "fp16"), available=64, total=64, free=5)
    assert caught.value.parameters == ("out",)


def test_short_memory_is_a_warning_and_hopeless_memory_an_error() -> None:
    needed = estimate(WEIGHTS, "fp16", profiles={"target": 1})  # about 49 GB
    (warning,) = checked(needed, available=20, total=40, free=100)
    assert "49 GB of memory" in warning
    assert "20 GB are available" in warning
    with pytest.raises(EagleError, match=r"49 GB of memory are needed, there are 24 GB") as caught:
        checked(needed, available=20, total=24, free=100)
    assert "eagle-export compile" in caught.value.hint
    assert caught.value.parameters == ("backend",)


def test_this_machine_has_memory() -> None:
    found = memory_here()
    assert 0 < found.available <= found.total
