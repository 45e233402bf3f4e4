"""The rewritten graphs against a slow reference, and the shape in which FP8 is stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from support.fp8ref import POSITIVE, merged, nearest, quantized_like_this

from eagle_export.checkpoints.fp8_scales import Scales, choose
from eagle_export.graphs.draft import export_draft
from eagle_export.graphs.target import export_target
from eagle_export.quantize.fp8 import rewrite
from eagle_export.quantize.fp8.rewrite import Quantized, quantize
from eagle_export.reference.eager import draft_graph, target_graph
from eagle_export.reference.modules import Modules
from eagle_export.verify.parity import Feed, _forwards, row_dependence
from eagle_run.backends.onnxruntime import OnnxRuntimeGraph
from eagle_run.errors import EagleError

ROWS = 64
FP8 = onnx.TensorProto.FLOAT8E4M3FN
# Mean difference from the reference, in units of what FP8 itself changes. In half precision the last bit of
# some activations differs, and where it decides an FP8 rounding, so does a whole FP8 step.
LIMITS = {torch.float32: 0.02, torch.float16: 0.5}


@dataclasses.dataclass(frozen=True)
class Exported:
    modules: Modules
    folder: Path
    done: dict[str, Quantized]


@pytest.fixture(scope="module", params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def exported(
    request: pytest.FixtureRequest,
    tiny_target: Path,
    tiny_head: Path,
    scales: Scales,
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    """Target and draft in FP8 around each base type."""
    from eagle_export.reference import recipe
    from eagle_export.reference.modules import load_config, load_fitting_head, load_modules

    found = recipe.resolve_target(str(tiny_target))
    head = load_fitting_head(recipe.resolve_head(str(tiny_head), found), load_config(found, 64))
    modules = load_modules(found, head, request.param)
    folder, chosen = tmp_path_factory.mktemp("fp8"), choose(scales)
    done: dict[str, Quantized] = {}

    def into(graph: str):
        return lambda model: done.update({graph: quantize(model, chosen.inputs[graph])})

    export_target(modules.target, folder / "target.onnx", cache_rows=ROWS, rewrite=into("target"))
    export_draft(modules.draft, folder / "draft.onnx", cache_rows=ROWS, rewrite=into("draft"))
    return Exported(modules, folder, done)


def test_every_number_and_every_middle_rounds_as_the_table_says() -> None:
    middles = (POSITIVE[1:] + POSITIVE[:-1]) / 2
    around = np.concatenate([POSITIVE, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), [449.0, 1e6]])
    values = np.concatenate([around, -around]).astype(np.float32)
    found = rewrite.to_fp8(torch.from_numpy(values), 1.0).float().numpy()
    assert np.array_equal(found, nearest(values))


def test_the_graph_computes_what_the_reference_computes(exported: Exported, scales: Scales) -> None:
    modules, chosen = exported.modules, choose(scales)
    dtype = next(modules.target.parameters()).dtype
    if dtype == torch.bfloat16:
        pytest.skip("ONNX Runtime has no bf16 products on a CPU; the stored graph is checked below")
    pairs = {
        "target": (modules.model, target_graph(modules.target, ROWS)),
        "draft": (modules.draft, draft_graph(modules.draft, ROWS)),
    }
    generator = torch.Generator().manual_seed(3)
    for graph, (module, eager) in pairs.items():
        runtime = Feed(OnnxRuntimeGraph(exported.folder / f"{graph}.onnx", graph))
        reference, plain = Feed(eager), Feed(eager)
        for inputs in _forwards(reference, seed=5):
            hidden = torch.randn(*inputs["input_ids"].shape, 32, generator=generator).to(dtype)
            given = {**inputs, "hidden": hidden}
            found, exact = runtime(given), plain(given)
            with quantized_like_this(module, chosen.inputs[graph], merged(list(chosen.inputs[graph]))):
                wanted = reference(given)
            for name, value in found.items():
                error = (value.float() - wanted[name].float()).abs().mean()
                effect = (exact[name].float() - wanted[name].float()).abs().mean()
                assert error < LIMITS[dtype] * effect, (graph, name)


def test_weights_are_stored_in_fp8_and_scales_in_float32(exported: Exported, scales: Scales) -> None:
    for graph, kept in (("target", {"lm_head.weight.T"}), ("draft", {"lm_head.weight.T"})):
        model = onnx.load(exported.folder / f"{graph}.onnx")
        onnx.checker.check_model(model, full_check=True)
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        used = [node for node in model.graph.node if node.op_type == "MatMul"]
        plain = {name for node in used for name in node.input if name in stored}
        assert plain == kept
        factors = {
            name
            for node in model.graph.node
            if node.op_type in ("QuantizeLinear", "DequantizeLinear")
            for name in node.input[1:2]
        }
        assert {stored[name].data_type for name in factors} == {onnx.TensorProto.FLOAT}
        assert all(list(stored[name].dims) == [] for name in factors)
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
        layers = [
            layer.removesuffix(".weight.T")
            for name, tensor in stored.items()
            if tensor.data_type == FP8 and name.endswith(".fp8")
            for layer in name.removesuffix(".fp8").split("+")
        ]
        assert sorted(layers) == sorted(choose(scales).inputs[graph])
        assert sorted(exported.done[graph].linears) == sorted(layers)


def test_a_merged_product_has_one_weight_scale_and_one_input_pair(exported: Exported) -> None:
    model = onnx.load(exported.folder / "target.onnx")
    count = {kind: sum(n.op_type == kind for n in model.graph.node) for kind in ("QuantizeLinear", "MatMul")}
    assert exported.done["target"].products == 3 * 4  # qkv, o, gate and up, down of three layers
    assert count == {"QuantizeLinear": 12, "MatMul": 13}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    part = "model.layers.1.self_attn.{}_proj.weight.T"
    name = "+".join(part.format(letter) for letter in "qkv")
    values = onnx.numpy_helper.to_array(stored[f"{name}.fp8"]).astype(np.float32)
    factor = onnx.numpy_helper.to_array(stored[f"{name}.scale"])
    joined = torch.cat(
        [
            exported.modules.model.get_parameter(f"model.layers.1.self_attn.{letter}_proj.weight").float()
            for letter in "qkv"
        ]
    )
    assert float(factor) == pytest.approx(float(joined.detach().abs().max()) / 448, rel=1e-6)
    assert np.array_equal(values, nearest((joined / torch.tensor(factor)).detach().numpy().T))


def test_a_rows_result_does_not_depend_on_its_neighbours(exported: Exported) -> None:
    if next(exported.modules.target.parameters()).dtype == torch.bfloat16:
        pytest.skip("ONNX Runtime has no bf16 products on a CPU")
    limit = {torch.float32: 1e-4, torch.float16: 2e-2}[next(exported.modules.target.parameters()).dtype]
    assert row_dependence(OnnxRuntimeGraph(exported.folder / "target.onnx", "target")) < limit


def test_scales_that_follow_the_rows_would_break_that(modules: Modules) -> None:
    """What the test above would find: the same model with the largest value of each forward as scale."""
    from eagle_export.quantize.fp8.fake import rounded

    handles = [
        part.register_forward_pre_hook(lambda _, args: (rounded(args[0], args[0].abs().max() / 448),))
        for name, part in modules.model.named_modules()
        if name.endswith("_proj")
    ]
    try:
        assert row_dependence(target_graph(modules.target, ROWS)) > 1e-2
    finally:
        for handle in handles:
            handle.remove()


def test_a_kept_layer_keeps_its_product(modules: Modules, scales: Scales, tmp_path: Path) -> None:
    chosen = choose(scales, keep=("*.1.mlp.down_proj", "*.k_proj"))
    done: list[Quantized] = []
    export_target(
        modules.target,
        tmp_path / "target.onnx",
        cache_rows=ROWS,
        rewrite=lambda model: done.append(quantize(model, chosen.inputs["target"])),
    )
    assert done[0].products == 12 - 1 - 3
    assert {name.rpartition(".")[2] for name in done[0].kept_along} == {"q_proj", "v_proj"}
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert types["model.layers.1.mlp.down_proj.weight.T"] == onnx.TensorProto.FLOAT
    assert types["model.layers.0.mlp.down_proj.weight.T.fp8"] == FP8


def test_a_layer_that_is_not_in_the_graph_is_an_error(modules: Modules, tmp_path: Path) -> None:
    def into(model: ir.Model) -> None:
        quantize(model, {"model.layers.0.mlp.down_proj": 1.0, "model.layers.9.mlp.down_proj": 1.0})

    with pytest.raises(EagleError, match=r"1 linear layers .* model\.layers\.9\.mlp\.down_proj"):
        export_target(modules.target, tmp_path / "target.onnx", cache_rows=ROWS, rewrite=into)
    assert not list(tmp_path.iterdir())


def test_a_tied_lm_head_cannot_be_quantised(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from eagle_export.models.target import TargetModule

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    module = TargetModule(LlamaForCausalLM(config).eval(), (0,)).eval()
    with pytest.raises(EagleError, match="lm_head") as caught:
        export_target(
            module, tmp_path / "target.onnx", cache_rows=32, rewrite=lambda m: quantize(m, {"lm_head": 1.0})
        )
    assert "tied" in caught.value.hint


def test_weights_are_converted_when_they_are_written(
    modules: Modules, scales: Scales, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[int] = []
    real = rewrite.to_fp8
    monkeypatch.setattr(rewrite, "to_fp8", lambda x, s: converted.append(x.numel()) or real(x, s))
    inputs = choose(scales).inputs["target"]

    def into(model: ir.Model) -> None:
        quantize(model, inputs)
        assert not converted

    export_target(modules.target, tmp_path / "target.onnx", cache_rows=ROWS, rewrite=into)
    assert len(converted) == 12
