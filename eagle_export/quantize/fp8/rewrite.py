"""The graph pass: a product with a constant matrix becomes a product of FP8 numbers.

    x ─ QuantizeLinear ─ DequantizeLinear ─┐
                                           MatMul    (x and W are rounded to FP8 and scaled back)
    W (fp8 initializer) ─ DequantizeLinear ┘

A compiler sees both sides quantised and multiplies the FP8 numbers themselves; a runtime that does not, such
as ONNX Runtime on a CPU, computes what is written. Scales are float32: with half-precision scales compilers
were seen to keep raw sums of products, which pass 65504 in every layer of a real model, in half. For the same
reason a merged product (q, k, v; gate, up) shares one weight scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from eagle_export.checkpoints.fp8_scales import LARGEST
from eagle_export.checkpoints.stored import largest
from eagle_export.checkpoints.weight_stream import Blocks, Rows, Streamed, stream
from eagle_export.graphs.passes import register
from eagle_run.errors import EagleError

if TYPE_CHECKING:
    from eagle_export.checkpoints.fp8_checkpoint import Checkpoint

_FP8 = ir.DataType.FLOAT8E4M3FN
_BASES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Quantized:
    """What `quantize` did: MatMuls, the linear layers in them, and layers kept because their group is."""

    products: int
    linears: tuple[str, ...]
    kept_along: tuple[str, ...]


def quantize(model: ir.Model, inputs: Mapping[str, float], checkpoint: Checkpoint | None = None) -> Quantized:
    """Quantises the products of the linear layers in `inputs` (layer -> input scale), in place.

    A merged product is quantised when all of its layers are in `inputs`; its input scale is the largest of
    theirs (they read the same rows, so calibrated ones are equal). Weights of layers that `checkpoint` holds
    are taken from there, bytes and scales; all others get one scale per product. They are converted when the
    graph is written, one at a time.

    Raises EagleError when a layer in `inputs` is not a product with a plain weight of this graph.
    """
    scope = _Scope(model)
    missing = dict.fromkeys(inputs)
    kept: list[str] = []
    done: list[str] = []
    products = 0
    for node in list(model.graph):
        layers = _layers_of(node)
        for layer in layers:
            missing.pop(layer, None)
        chosen = [layer for layer in layers if layer in inputs]
        if not chosen:
            continue
        weight = _stored(layers, checkpoint)
        if len(chosen) < len(layers) or weight == "partly":
            kept += chosen
            continue
        scale = max(inputs[layer] for layer in layers)
        scope.replace(node, layers, scale, None if weight == "none" else checkpoint)
        done += layers
        products += 1
    if missing:
        raise EagleError(
            f"{len(missing)} linear layers have a scale but no product in the {model.graph.name} graph: "
            f"{', '.join(list(missing)[:4])}{', …' if len(missing) > 4 else ''}",
            hint="an lm_head that is tied to the embedding cannot be quantised; scales must be of this model",
        )
    return Quantized(products, tuple(done), tuple(kept))


def _layers_of(node: ir.Node) -> list[str]:
    """The linear layers whose weights a MatMul multiplies with, side by side; none for another node."""
    if node.op_type != "MatMul" or node.inputs[1] is None or not node.inputs[1].is_initializer():
        return []
    weight = node.inputs[1]
    parts = (weight.name or "").split("+")
    if len(weight.shape or ()) != 2 or not all(part.endswith(".weight.T") for part in parts):
        return []
    return [part.removesuffix(".weight.T") for part in parts]


def _stored(layers: list[str], checkpoint: Checkpoint | None) -> str:
    """Whether the checkpoint holds "all" of these layers in FP8, "none" or only a part ("partly")."""
    count = 0 if checkpoint is None else sum(layer in checkpoint.layers for layer in layers)
    return "none" if count == 0 else "all" if count == len(layers) else "partly"


@dataclass
class _Scope:
    """The graph being rewritten, and the constants and quantised rows that are already in it."""

    model: ir.Model
    constants: dict[str, ir.Value] = field(default_factory=dict)
    rows: dict[tuple[ir.Value, float], ir.Value] = field(default_factory=dict)

    def replace(self, node: ir.Node, layers: list[str], scale: float, checkpoint: Checkpoint | None) -> None:
        x, weight = node.inputs
        assert x is not None
        assert weight is not None
        base = weight.dtype
        if base not in _BASES:
            raise EagleError(f"{weight.name} is {base}, expected a floating-point weight")
        if (x, scale) not in self.rows:
            self.rows[x, scale] = self._quantized_rows(node, x, scale, base)
        name, factors = f"{weight.name}.fp8", f"{weight.name}.scale"
        stored: ir.TensorProtocol
        scales: ir.TensorProtocol
        if checkpoint is None:
            stored = own = _OwnWeight(name, stream(weight.const_value))
            scales = ir.LazyTensor(own.scale_tensor, ir.DataType.FLOAT, ir.Shape([]), name=factors)
        else:
            stored, scales = _given_weight(name, weight, layers, checkpoint)
        del self.model.graph.initializers[weight.name]
        quantized = self._register(name, stored)
        factor = self._register(factors, scales)
        back = self._dequantize(node, "Weight", quantized, factor, base)
        node.replace_input_with(0, self.rows[x, scale])
        node.replace_input_with(1, back)

    def _quantized_rows(self, before: ir.Node, x: ir.Value, scale: float, base: ir.DataType) -> ir.Value:
        factor = self._constant(f"scale_{scale!r}", ir.tensor(np.array(scale, np.float32)))
        zero = self._constant("zero_fp8", ir.tensor(np.zeros((), ml_dtypes.float8_e4m3fn), dtype=_FP8))
        attributes = {"precision": int(ir.DataType.FLOAT), "saturate": 1}
        node = ir.node("QuantizeLinear", [x, factor, zero], attributes, name=f"{before.name}/QuantizeInput")
        node.outputs[0].shape, node.outputs[0].dtype = x.shape, _FP8
        self.model.graph.insert_before(before, node)
        return self._dequantize(before, "Input", node.outputs[0], factor, base)

    def _dequantize(
        self, before: ir.Node, what: str, x: ir.Value, factor: ir.Value, base: ir.DataType
    ) -> ir.Value:
        attributes = {"output_dtype": int(base)} | ({"axis": 1} if factor.shape else {})  # [N]: one a column
        node = ir.node("DequantizeLinear", [x, factor], attributes, name=f"{before.name}/Dequantize{what}")
        node.outputs[0].shape, node.outputs[0].dtype = x.shape, base
        self.model.graph.insert_before(before, node)
        return node.outputs[0]

    def _constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        if name not in self.constants:
            self.constants[name] = self._register(name, tensor)
        return self.constants[name]

    def _register(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = name
        return register(self.model, tensor)


class _OwnWeight(Blocks):
    """A weight [K, N] that is quantised here while it is written, and its one scale."""

    def __init__(self, name: str, source: Streamed) -> None:
        super().__init__(name, torch.float8_e4m3fn, source.sizes)
        self._source = source
        self._scale: Tensor | None = None

    def blocks(self) -> Iterator[Tensor]:
        rows = self._source.open()
        scale = self._found(rows)
        for start, stop in self._source.steps():
            yield to_fp8(rows(start, stop), scale)

    def scale_tensor(self) -> ir.TensorProtocol:
        """float32 []. It is known once the weight was written; asked for before, it reads the weight."""
        scale = self._scale if self._scale is not None else self._found(self._source.open())
        return ir.tensor(scale.numpy())

    def _found(self, rows: Rows) -> Tensor:
        if self._scale is None:
            peaks = [largest(rows(start, stop)) for start, stop in self._source.steps()]
            self._scale = weight_scale(torch.tensor(peaks))
        return self._scale


def _given_weight(
    name: str, weight: ir.Value, layers: list[str], checkpoint: Checkpoint
) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """The checkpoint's own bytes, transposed and side by side, and their scales: float32 [] or [N]."""
    parts = [checkpoint.layers[layer] for layer in layers]
    expected = tuple(weight.const_value.shape)
    shape = (parts[0].shape[1], sum(part.shape[0] for part in parts))
    if shape != expected:
        raise EagleError(f"{weight.name}: the checkpoint has {list(shape)}, the graph {list(expected)}")
    columns = torch.cat([part.weight_scale.expand(part.shape[0]) for part in parts])  # [N]
    scales = columns[0] if bool((columns == columns[0]).all()) else columns
    stored = Streamed(name, [(part.stored, (1, 0)) for part in parts], torch.float8_e4m3fn)  # [K, N]
    return stored, ir.tensor(scales.numpy())


def weight_scale(weight: Tensor) -> Tensor:
    """float32 []: the scale with which the largest magnitude of a weight is FP8's largest number."""
    amax = weight.abs().amax().float()
    if not bool(torch.isfinite(amax)):
        raise EagleError("a weight holds values that are not finite numbers", hint="download the model again")
    return amax.clamp(min=1e-12) / LARGEST


def to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """x / scale in float32, to the nearest FP8 number (ties to even); beyond the range, the largest."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
