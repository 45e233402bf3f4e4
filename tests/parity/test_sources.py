"""Graphs below float32 are held to their source weights, sharply, on a CPU that computes neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir
import pytest
import torch
from support.tiny import build_bundle

from eagle_export.pipeline.options import Fp8Options
from eagle_export.reference.modules import Modules, eager_graphs, reference_of
from eagle_export.verify.parity import LIMITS, compare
from eagle_export.verify.sources import (
    base_precision,
    fp8_weights,
    onnx_precision,
    read_products,
    wide_graphs,
    widen,
    widen_modules,
)
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.errors import EagleError

pytestmark = pytest.mark.slow  # four bundles are built
KINDS = {
    "fp16": ("fp16", "fp16"),
    "bf16": ("bf16", "fp16"),
    "fp8": ("fp8", "fp16"),
    "fp8 on bf16": ("fp8", "bf16"),
}


@pytest.fixture(scope="module")
def bundles(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")

    def made(kind: str) -> Bundle:
        precision, base = KINDS[kind]
        fp8 = Fp8Options(base=base) if precision == "fp8" else Fp8Options()
        out = folder / kind.replace(" ", "-")
        return load_bundle(
            build_bundle(tiny_target, tiny_head, out, precision=precision, fp8=fp8, measure=False)
        )

    return {kind: made(kind) for kind in KINDS}


def source(bundle: Bundle) -> Modules:
    return widen_modules(reference_of(bundle.manifest, precision=base_precision(bundle)))


def differences(bundle: Bundle, modules: Modules, folder: Path) -> dict[str, float]:
    """Largest difference of each graph from `modules`."""
    worst: dict[str, float] = {}
    graphs = wide_graphs(bundle, folder, threads=1)
    with fp8_weights(modules, bundle):
        for found in compare(graphs, eager_graphs(modules, bundle.manifest.limits.cache_rows)):
            worst[found.graph] = max(worst.get(found.graph, 0.0), found.value)
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_sound_graphs_are_their_sources(kind: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundle = bundles[kind]
    assert (onnx_precision(bundle), base_precision(bundle)) == (
        KINDS[kind][0],
        "bf16" if "bf16" in kind else "fp16",
    )
    found = differences(bundle, source(bundle), tmp_path)
    assert set(found) == {"target", "fuse", "draft"}
    assert max(found.values()) < LIMITS["fp32"] / 10


def _one_matrix(modules: Modules) -> None:
    modules.model.model.layers[1].mlp.down_proj.weight.data *= 1.05


def _one_draft_matrix(modules: Modules) -> None:
    assert modules.draft is not None
    modules.draft.midlayer.mlp.up_proj.weight.data *= 1.05


def _fuse(modules: Modules) -> None:
    assert modules.fuse is not None
    modules.fuse.fc.weight.data *= 1.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "graph"), [(_one_matrix, "target"), (_one_draft_matrix, "draft"), (_fuse, "fuse")]
)
def test_one_matrix_that_is_5_percent_off_shows_in_its_graph_alone(
    change: Callable[[Modules], None], graph: str, kind: str, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    modules = source(bundles[kind])
    change(modules)
    found = differences(bundles[kind], modules, tmp_path)
    assert {name for name, value in found.items() if value > LIMITS["fp32"]} == {graph}


def test_weights_are_put_back(bundles: dict[str, Bundle]) -> None:
    modules = source(bundles["fp8"])
    before = {name: weight.clone() for name, weight in modules.model.named_parameters()}
    with fp8_weights(modules, bundles["fp8"]):
        changed = {
            name for name, weight in modules.model.named_parameters() if not torch.equal(weight, before[name])
        }
    assert len(changed) == 7 * 3  # every linear layer; lm_head is kept
    assert "lm_head.weight" not in changed
    assert all(torch.equal(weight, before[name]) for name, weight in modules.model.named_parameters())


def test_products_of_another_model_are_refused(bundles: dict[str, Bundle]) -> None:
    modules = source(bundles["fp8"])
    modules.model.model.layers[0].mlp.up_proj = torch.nn.Identity()
    with (
        pytest.raises(EagleError, match=r"does not: \['model\.layers\.0\.mlp\.up_proj'\]"),
        fp8_weights(modules, bundles["fp8"]),
    ):
        pass


def test_products_are_read_with_their_layers_and_scales(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["fp8"]
    products = read_products(bundle.file(bundle.artifact("target")))
    assert len(products) == 4 * 3
    merged = next(product for product in products if len(product.layers) == 3)
    assert [name.rsplit(".", 1)[1] for name in merged.layers] == ["q_proj", "k_proj", "v_proj"]
    assert all(float(product.scale) > 0 for product in products)
    assert read_products(bundle.file(bundle.artifact("fuse"))) == []


@pytest.mark.parametrize("fp8_rows", [True, False])
def test_nothing_narrow_is_left_but_what_is_fp8(
    fp8_rows: bool, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    bundle = bundles["fp8 on bf16"]
    file = widen(bundle.file(bundle.artifact("target")), tmp_path / "target.onnx", fp8_rows=fp8_rows)
    graph = onnx_ir.load(file).graph
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    types = {value.dtype for value in values}
    assert not types & {onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT16}
    assert onnx_ir.DataType.FLOAT8E4M3FN in types
    rounded = [node for node in graph if node.op_type == "QuantizeLinear"]
    assert bool(rounded) is fp8_rows
