"""How graphs below float32 are compared with their source weights on a CPU.

Two 16-bit programs round in different places: on a real model logits part by half a unit, which hides faults.
FP8 values of activations are chaotic even in float32: a last bit decides which way one is rounded, and a few
layers on everything is different. And ONNX Runtime has no bfloat16 kernels on CPUs. So wiring and weights are
compared in float32, with 16-bit and FP8 weights as they are and activations left alone; what the rounding of
activations costs is for accuracy.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.quantize.fp8.calibrate import named_graphs, named_linears
from eagle_export.quantize.fp8.fake import rounded
from eagle_export.reference.modules import Modules
from eagle_run.backends.base import Graph
from eagle_run.bundle.loading import Bundle
from eagle_run.errors import EagleError


@dataclass(frozen=True, eq=False)
class Product:
    """One product of an FP8 graph: the linear layers in it, side by side, and the scale of their weights.

    `scale` is float32 [], or one per output column [N].
    """

    layers: tuple[str, ...]
    scale: Tensor


def onnx_precision(bundle: Bundle) -> str:
    """The precision of the target's ONNX graph. Raises EagleError when the bundle holds engines alone."""
    artifacts = [artifact for artifact in bundle.artifacts("target") if artifact.backend == "onnx"]
    if not artifacts:
        backends = ", ".join(sorted({artifact.backend for artifact in bundle.artifacts("target")})) or "none"
        raise EagleError(
            f"{bundle.path}: no ONNX graph of the target to verify; the bundle has {backends}",
            hint="verify the bundle that the engines were compiled from",
        )
    return artifacts[0].precision


def base_precision(bundle: Bundle) -> str:
    """The type of everything in the target's ONNX graph that is not FP8."""
    quantization = bundle.manifest.quantization
    precision = onnx_precision(bundle)
    return quantization.base if precision == "fp8" and quantization is not None else precision


def read_products(path: Path) -> list[Product]:
    """The products of an ONNX graph with an FP8 weight, in its order."""
    from eagle_export.graphs.files import load

    products = []
    for node in load(path).graph:
        if node.op_type != "MatMul":
            continue
        weight = node.inputs[1].producer()
        if weight is not None and weight.op_type == "DequantizeLinear":
            stored = str(weight.inputs[0].name).removesuffix(".fp8").split("+")
            layers = tuple(name.removesuffix(".weight.T") for name in stored)
            scale = torch.from_numpy(weight.inputs[1].const_value.numpy().copy())
            products.append(Product(layers, scale))
    return products


@contextmanager
def fp8_weights(modules: Modules, bundle: Bundle) -> Iterator[None]:
    """While this lasts, linear layers that the bundle's graphs hold in FP8 have weights rounded like theirs.

    They are rounded from the source with the graph's scales, so a graph with other weights is not excused.
    Raises EagleError for a product whose layers the modules do not have.
    """
    originals: list[tuple[nn.Linear, Tensor]] = []
    try:
        for name, module in named_graphs(modules).items():
            linears = named_linears(module)
            for product in read_products(bundle.file(bundle.artifact(name, "onnx"))):  # type: ignore[arg-type]
                if unknown := [layer for layer in product.layers if layer not in linears]:
                    raise EagleError(f"the {name} graph has FP8 weights that the source does not: {unknown}")
                chosen = [linears[layer] for layer in product.layers]
                originals += [(linear, linear.weight.data) for linear in chosen]
                _round(chosen, product.scale)
        yield
    finally:
        for linear, weight in originals:
            linear.weight.data = weight


def _round(linears: Sequence[nn.Linear], scale: Tensor) -> None:
    """Weights [N, K] through FP8 and back; scale [] or [N] over the rows of all of them."""
    sizes = [linear.out_features for linear in linears]
    for linear, own in zip(linears, scale.expand(sum(sizes)).split(sizes), strict=True):
        linear.weight.data = rounded(linear.weight.data, own[:, None])


def wide_graphs(
    bundle: Bundle, folder: Path, *, fp8_rows: bool = False, threads: int = 0
) -> dict[str, Graph]:
    """The bundle's ONNX graphs widened (see `widen`), in ONNX Runtime; their files go to `folder`."""
    from eagle_run.backends.onnxruntime import OnnxRuntimeGraph

    graphs: dict[str, Graph] = {}
    for artifact in bundle.manifest.artifacts:
        if artifact.backend == "onnx":
            file = widen(bundle.file(artifact), folder / f"{artifact.graph}.onnx", fp8_rows=fp8_rows)
            graphs[artifact.graph] = OnnxRuntimeGraph(file, artifact.graph, threads=threads)
    return graphs


def widen_modules(modules: Modules) -> Modules:
    """The same modules, computing in float32 from now on; weights keep their values."""
    for part in (modules.target, modules.fuse, modules.draft):
        if part is not None:
            part.float()
    return modules


def widen(source: Path, out: Path, *, fp8_rows: bool = False) -> Path:
    """Writes the graph `source` as `out` (and its data) with float32 in place of 16 bit.

    Unless `fp8_rows`, Q/DQ pairs of activations are left out. Weights keep their values, FP8 ones as well;
    only what is computed from them is no longer rounded.
    """
    import onnx_ir

    from eagle_export.graphs.files import load

    narrow = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
    model = load(source)
    graph = model.graph
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype in narrow:
            value.const_value = _widened(value.const_value, value.name)
    outputs = [value for node in graph for value in node.outputs]
    for value in [*graph.inputs, *graph.initializers.values(), *outputs]:
        if value.dtype in narrow:
            value.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    for node in list(graph):
        _widen_attributes(node)
        rows = node.inputs[0].producer() if node.op_type == "DequantizeLinear" else None
        if not fp8_rows and rows is not None and rows.op_type == "QuantizeLinear":
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], rows.inputs[0])
            graph.remove([node, rows] if len(rows.outputs[0].uses()) == 1 else node, safe=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    onnx_ir.save(model, out, external_data=f"{out.name}.data")
    return out


def _widen_attributes(node: Any) -> None:
    import onnx_ir

    narrow = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
    for key, attribute in list(node.attributes.items()):
        if key in ("to", "output_dtype") and attribute.value in map(int, narrow):
            node.attributes[key] = onnx_ir.AttrInt64(key, int(onnx_ir.DataType.FLOAT))
        elif attribute.type == onnx_ir.AttributeType.TENSOR and attribute.value.dtype in narrow:
            node.attributes[key] = onnx_ir.AttrTensor(key, _widened(attribute.value, key))


def _widened(tensor: Any, name: str) -> Any:
    import numpy
    import onnx_ir

    def compute() -> Any:
        return onnx_ir.tensor(tensor.numpy().astype(numpy.float32), name=name)

    return onnx_ir.LazyTensor(
        compute, dtype=onnx_ir.DataType.FLOAT, shape=tensor.shape, cache=False, name=name
    )
