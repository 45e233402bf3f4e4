"""One product by hand: sharing, overflow, saturation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from support.fp8ref import nearest

from eagle_export.graphs import files
from eagle_export.quantize.fp8.rewrite import Quantized, quantize
from eagle_run.errors import EagleError


def _two_products(base: ir.DataType, a: np.ndarray, b: np.ndarray) -> ir.Model:
    """x [T, K] times a and times b, which stay two products because nothing merges them here."""
    x = ir.Value(name="x", shape=ir.Shape(["T", a.shape[0]]), type=ir.TensorType(base))
    weights = [
        ir.Value(
            name=f"{name}.weight.T",
            shape=ir.Shape(array.shape),
            type=ir.TensorType(base),
            const_value=ir.tensor(array.astype(base.numpy()), name=f"{name}.weight.T"),
        )
        for name, array in (("a", a), ("b", b))
    ]
    nodes = [ir.node("MatMul", [x, weight], name=f"{weight.name}/MatMul") for weight in weights]
    for node, name, array in zip(nodes, "yz", (a, b), strict=True):
        node.outputs[0].name = name
        node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(["T", array.shape[1]]), base
    graph = ir.Graph(
        [x],
        [node.outputs[0] for node in nodes],
        nodes=nodes,
        initializers=weights,
        opset_imports={"": 24},
        name="hand",
    )
    return ir.Model(graph, ir_version=11)


def _run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def test_products_of_the_same_rows_share_one_pair() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(8, 4)), generator.normal(size=(8, 6))
    model = _two_products(ir.DataType.FLOAT, a, b)
    assert quantize(model, {"a": 0.01, "b": 0.01}) == Quantized(2, ("a", "b"), ())
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("QuantizeLinear") == 1
    assert kinds.count("DequantizeLinear") == 3
    x = generator.normal(size=(5, 8)).astype(np.float32)
    rows = nearest(x / np.float32(0.01)) * np.float32(0.01)
    for found, weight in zip(_run(model, x), (a, b), strict=True):
        scale = np.float32(np.abs(weight.astype(np.float32)).max()) / np.float32(448)
        wanted = rows @ (nearest(weight.astype(np.float32) / scale) * scale)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_sums_beyond_half_precision_come_out_right() -> None:
    """The sum of the FP8 numbers' products is over 10^7, what it stands for is about 100."""
    depth = 512
    weight = np.full((depth, 4), 0.5) * np.array([1, -1, 0.5, 1])
    model = _two_products(ir.DataType.FLOAT16, weight, weight)
    quantize(model, {"a": 0.4 / 448, "b": 0.4 / 448})
    x = np.full((3, depth), 0.4, np.float16)
    raw = 448.0 * 448.0 * depth
    assert raw > 1e3 * 65504
    wanted = 0.4 * weight.sum(0)
    np.testing.assert_allclose(_run(model, x)[0], np.tile(wanted, (3, 1)), rtol=4e-3)
    factors = [value for name, value in model.graph.initializers.items() if "scale" in name]
    assert {value.dtype for value in factors} == {ir.DataType.FLOAT}


def test_a_value_beyond_the_range_becomes_the_largest() -> None:
    weight = np.eye(4)
    model = _two_products(ir.DataType.FLOAT, weight, weight)
    quantize(model, {"a": 1.0, "b": 1.0})
    found = _run(model, np.array([[1e6, -1e6, 448.0, 1.0]], np.float32))[0]
    np.testing.assert_allclose(found, [[448.0, -448.0, 448.0, 1.0]], rtol=1e-6)


def test_a_weight_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    """Found when it is written: weights are read one at a time, and no sooner."""
    weight = np.full((128, 128), np.nan)
    model = _two_products(ir.DataType.FLOAT, weight, weight)
    quantize(model, {"a": 1.0, "b": 1.0})
    with pytest.raises(EagleError, match="not finite"):
        files.save(model, tmp_path / "two.onnx", "two.onnx.data")
    assert not any(tmp_path.iterdir())
