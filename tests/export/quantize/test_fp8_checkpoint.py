"""Targets that come in FP8: read in every dialect, taken over byte by byte, refused when of another kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fp8ref import PROMPTS, through
from support.fp8writer import FP8, MODELOPT, PLAIN, compressed, write_quantized
from support.tiny import modules_of

from eagle_export.checkpoints.fp8_checkpoint import read_checkpoint
from eagle_export.checkpoints.fp8_scales import Scales, choose
from eagle_export.graphs.target import export_target
from eagle_export.models.target import load_target
from eagle_export.quantize.fp8.calibrate import calibrate
from eagle_export.quantize.fp8.rewrite import quantize
from eagle_export.verify.parity import Feed, _forwards
from eagle_run.backends.onnxruntime import OnnxRuntimeGraph
from eagle_run.errors import EagleError

CACHE_SCALES = {
    "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5),
    "model.layers.0.self_attn.v_proj.v_scale": torch.tensor(0.5),
}
DIALECTS: dict[str, dict[str, Any]] = {
    "modelopt": {"config": {}, "separate": MODELOPT, "extra": CACHE_SCALES},
    "modelopt-in-config": {
        "config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    },
    "compressed-tensors-static": {"config": compressed("tensor", dynamic=False)},
    "compressed-tensors": {
        "config": compressed(),
        "channel": True,
        "static": False,
        "scale_dtype": torch.bfloat16,
    },
    "fp8": {"config": PLAIN},
    "fp8-inverse": {"config": PLAIN, "names": ("weight_scale_inv", "activation_scale")},
}


@pytest.fixture(scope="module", params=list(DIALECTS))
def written(
    request: pytest.FixtureRequest, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp(request.param) / "target"
    return request.param, folder, write_quantized(folder, tiny_target, **DIALECTS[request.param])


def _plain_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the stored numbers stand for, in float32."""
    weights = {}
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            layer = name.removesuffix("weight")
            scale = next(
                tensors[layer + key] for key in ("weight_scale", "weight_scale_inv") if layer + key in tensors
            )
            weights[name] = tensor.float() * scale.float()
        elif name.endswith("weight"):
            weights[name] = tensor
    return weights


def test_it_loads_as_the_model_that_it_stands_for(
    written: tuple[str, Path, dict[str, torch.Tensor]], tiny_target: Path, tmp_path: Path
) -> None:
    _, folder, tensors = written
    for path in tiny_target.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(_plain_weights(tensors), tmp_path / "model.safetensors")
    plain, found = load_target(tmp_path, torch.float32), load_target(folder, torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, plain(ids).logits)
    assert getattr(found.config, "quantization_config", None) is None
    assert load_target(folder, torch.float16).lm_head.weight.dtype == torch.float16


def test_bytes_and_scales_are_in_the_graph_as_they_were(
    written: tuple[str, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    name, folder, tensors = written
    given = read_checkpoint(folder)
    assert given is not None
    assert given.source == name.removesuffix("-in-config").removesuffix("-static").removesuffix("-inverse")
    assert given.static == (name != "compressed-tensors")
    assert len(given.layers) == 3 * 7
    modules = modules_of(folder)
    scales = choose(given.join(calibrate(modules, PROMPTS, tokens=4)))
    assert scales.source == given.source
    export_target(
        modules.target,
        tmp_path / "target.onnx",
        cache_rows=64,
        rewrite=lambda model: quantize(model, scales.inputs["target"], given),
    )
    model = onnx.load(tmp_path / "target.onnx")
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    merged = [key.removesuffix(".fp8") for key in stored if key.endswith(".fp8")]
    assert sorted(part.removesuffix(".T") for key in merged for part in key.split("+")) == sorted(
        f"{layer}.weight" for layer in given.layers
    )
    for key in merged:
        layers = [part.removesuffix(".weight.T") for part in key.split("+")]
        bytes_ = torch.cat([tensors[f"{layer}.weight"].view(torch.uint8).T for layer in layers], 1)
        found = onnx.numpy_helper.to_array(stored[f"{key}.fp8"]).view(np.uint8)
        assert np.array_equal(found, bytes_.numpy())
        factors = torch.cat(
            [given.layers[layer].weight_scale.expand(tensors[f"{layer}.weight"].shape[0]) for layer in layers]
        )
        kept = onnx.numpy_helper.to_array(stored[f"{key}.scale"])
        assert kept.dtype == np.float32
        assert kept.shape == (() if len(factors.unique()) == 1 else factors.shape)
        assert np.array_equal(np.broadcast_to(kept, factors.shape), factors.numpy())
    if given.static:
        used = {
            float(onnx.numpy_helper.to_array(stored[node.input[1]]))
            for node in model.graph.node
            if node.op_type == "QuantizeLinear"
        }
        largest = max(float(tensors[f"model.layers.0.self_attn.{k}_proj.{_input(name)}"]) for k in "qkv")
        assert largest in used
        assert len(used) == 3 * 4


def _input(dialect: str) -> str:
    return "activation_scale" if dialect == "fp8-inverse" else "input_scale"


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors"])
def test_the_graph_decodes_the_logits_of_the_dequantised_model(
    name: str, tiny_target: Path, tmp_path: Path
) -> None:
    """Activations are rounded by the graph alone, so they are rounded here by the reference."""
    folder = tmp_path / "target"
    write_quantized(folder, tiny_target, **DIALECTS[name])
    given, modules = read_checkpoint(folder), modules_of(folder)
    assert given is not None
    inputs = choose(given.join(calibrate(modules, PROMPTS, tokens=4))).inputs["target"]
    export_target(
        modules.target,
        tmp_path / "target.onnx",
        cache_rows=64,
        rewrite=lambda model: quantize(model, inputs, given),
    )
    from eagle_export.reference.eager import target_graph

    runtime = Feed(OnnxRuntimeGraph(tmp_path / "target.onnx", "target"))
    reference = Feed(target_graph(modules.target, 64))
    groups = {layer: layer.replace("k_proj", "q_proj").replace("v_proj", "q_proj") for layer in inputs}
    groups = {layer: group.replace("up_proj", "gate_proj") for layer, group in groups.items()}
    largest: dict[str, float] = {}
    for layer, group in groups.items():
        largest[group] = max(largest.get(group, 0.0), inputs[layer])
    handles = [
        modules.model.get_submodule(layer).register_forward_pre_hook(
            lambda _, args, scale=largest[groups[layer]]: (through(args[0], scale),)
        )
        for layer in inputs
    ]
    for batch in _forwards(reference, seed=2):
        found, wanted = runtime(batch)["logits"], reference(batch)["logits"]
        assert (found - wanted).abs().max() < 2e-3
    for handle in handles:
        handle.remove()


def test_a_partly_quantised_product_stays_in_16_bit(tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    write_quantized(folder, tiny_target, config=PLAIN, skip=("lm_head", "v_proj"))
    given, modules = read_checkpoint(folder), modules_of(folder)
    assert given is not None
    done = []
    export_target(
        modules.target,
        tmp_path / "target.onnx",
        cache_rows=64,
        rewrite=lambda model: done.append(quantize(model, given.join().inputs["target"], given)),
    )
    assert done[0].products == 3 * 3
    assert len(done[0].kept_along) == 3 * 2  # q and k


def test_notes_say_what_was_left_and_what_was_added(tiny_target: Path, tmp_path: Path) -> None:
    write_quantized(tmp_path / "a", tiny_target, **DIALECTS["modelopt"])
    write_quantized(tmp_path / "b", tiny_target, **DIALECTS["compressed-tensors"])
    a, b = read_checkpoint(tmp_path / "a"), read_checkpoint(tmp_path / "b")
    assert a is not None
    assert b is not None
    assert any("key-value cache" in note for note in a.notes)
    assert any("21 of them bring no input scale" in note for note in b.notes)
    only = compressed("tensor")
    only["config_groups"]["group_0"]["input_activations"] = None
    write_quantized(tmp_path / "c", tiny_target, config=only, static=False)
    c = read_checkpoint(tmp_path / "c")
    assert c is not None
    assert any("activations in 16 bit" in note for note in c.notes)


def test_dynamic_scales_need_calibration(tiny_target: Path, tmp_path: Path, scales: Scales) -> None:
    write_quantized(tmp_path / "a", tiny_target, **DIALECTS["compressed-tensors"])
    given = read_checkpoint(tmp_path / "a")
    assert given is not None
    with pytest.raises(EagleError, match="no input scale"):
        given.join()
    joined = given.join(scales)
    assert joined.inputs["target"] == {name: scales.inputs["target"][name] for name in given.layers}
    assert joined.inputs["draft"] == scales.inputs["draft"]
    assert joined == replace(scales, inputs=joined.inputs, source="compressed-tensors")


def test_a_plain_target_is_no_checkpoint(tiny_target: Path) -> None:
    assert read_checkpoint(tiny_target) is None


def test_scales_may_be_in_another_shard(tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    tensors = write_quantized(folder, tiny_target, config=PLAIN)
    parts = {
        "model-00001-of-00002.safetensors": {k: v for k, v in tensors.items() if v.dtype == FP8},
        "model-00002-of-00002.safetensors": {k: v for k, v in tensors.items() if v.dtype != FP8},
    }
    (folder / "model.safetensors").unlink()
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    given = read_checkpoint(folder)
    assert given is not None
    assert len(given.layers) == 21
    whole = load_target(folder, torch.float32)
    assert torch.equal(
        whole.model.layers[2].mlp.up_proj.weight,
        _plain_weights(tensors)["model.layers.2.mlp.up_proj.weight"],
    )


def test_what_the_library_itself_writes_is_read(tiny_target: Path, tmp_path: Path) -> None:
    """Where the compressed-tensors package is installed: a model that it compressed and saved."""
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModelForCausalLM

    assert library
    config = QuantizationConfig(
        config_groups={
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        ignore=["lm_head"],
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.data.abs().amax(1, keepdim=True) / 448)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder = tmp_path / "target"
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    given = read_checkpoint(folder)
    assert given is not None
    assert len(given.layers) == 21
    assert not given.static
    source = load_file(tiny_target / "model.safetensors")
    for name, layer in given.layers.items():
        weight = source[f"{name}.weight"]
        error = (layer.dequantize(torch.float32) - weight).abs().amax(1) / weight.abs().amax(1)
        assert float(error.max()) < 1 / 16
