"""Small rewrites of a traced graph. Each does one thing, and says no where the graph is not what it expects.

What is traced is correct but wordy: weights are transposed at run time, every reshape builds its shape anew,
and projections that read the same rows are separate products. On a CPU each node costs microseconds and each
product streams its weights through the caches on its own, so a decoding step is a matter of few, large nodes.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from eagle_export.checkpoints.weight_stream import Streamed, Weight, bind, stream
from eagle_run.dtypes import BY_ONNX
from eagle_run.errors import EagleError

_SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter notes the modules around a node, outermost first


def clean(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
    *,
    name: str,
    prefix: str = "",
    weights: Mapping[str, Weight] | None = None,
    linked: Callable[[ir.Value], bool] | None = None,
) -> None:
    """Everything that each graph goes through after tracing, in order. In place.

    `prefix` is dropped from the names of weights. Where the trace was of a model without weights, `weights`
    has them, by what remains of the name. `linked`: as for `transpose_weights`.
    """
    for value in list(model.graph.initializers.values()):
        value.name = (value.name or "").removeprefix(prefix)
    bind(model, weights or {})
    name_signature(model, inputs, outputs, dynamic)
    constant_reshapes(model)
    transpose_weights(model, linked)
    common.IdentityEliminationPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    merge_products(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    name_nodes(model, prefix)
    common.ClearMetadataAndDocStringPass()(model)
    model.graph.name = name
    model.producer_name, model.producer_version = "eagle-export", None


def name_nodes(model: ir.Model, prefix: str = "") -> None:
    """Name each node by the module that it comes from and what it does: model.layers.3.self_attn/Attention.

    So a compiler's errors and its list of layers speak of the model's own layers. Names are unique: further
    nodes of a kind in one module get _1, _2, .... `prefix` is dropped from the front of a module's name. A
    node that no module made is named by the graph's operation alone.
    """
    taken: Counter[str] = Counter()
    for node in model.graph:
        scope = _scope(node).removeprefix("module").removeprefix(".")
        scope = scope.removeprefix(prefix.removeprefix("module."))
        name = f"{scope}/{node.op_type}" if scope else node.op_type
        taken[name] += 1
        node.name = name if taken[name] == 1 else f"{name}_{taken[name] - 1}"


def name_signature(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    """Rename inputs, outputs and dynamic sizes (the tracer calls them s77). Raises when one became fixed."""
    graph = model.graph
    _rename(graph.inputs, inputs, "input")
    _rename(graph.outputs, outputs, "output")
    sizes: dict[str, str] = {}
    for value in graph.inputs:
        for axis, size in dynamic.get(value.name or "", {}).items():
            dim = _shape(value)[axis]
            if isinstance(dim, int):
                raise EagleError(
                    f"axis {axis} of {value.name} became {dim} when traced, expected {size} to stay dynamic"
                )
            sizes[str(dim)] = size
    everything = [value for node in graph for value in node.outputs if value.shape is not None]
    for value in (*graph.inputs, *graph.outputs, *everything):
        value.shape = ir.Shape(
            [dim if isinstance(dim, int) else sizes.get(str(dim), str(dim)) for dim in _shape(value)]
        )
    for value in (*graph.inputs, *graph.outputs):
        unknown = [
            dim for dim in _shape(value) if not isinstance(dim, int) and str(dim) not in sizes.values()
        ]
        if unknown:
            raise EagleError(
                f"{value.name} has sizes {unknown}, expected constants or {sorted(set(sizes.values()))}"
            )


def constant_reshapes(model: ir.Model) -> None:
    """Give each Reshape a constant shape where every output size is fixed or that of the input's same axis.

    Reshape copies the size of an axis for which the shape says 0. The tracer instead gathers sizes from other
    tensors at run time, which costs nodes and hides the shape from compilers.
    """
    shapes: dict[tuple[int, ...], ir.Value] = {}
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[0] is None:
            continue
        source, result = node.inputs[0].shape, node.outputs[0].shape
        if source is None or result is None:
            continue
        copied = [_copied_size(source, axis, dim) for axis, dim in enumerate(result)]
        shape = tuple(size for size in copied if size is not None)
        if len(shape) < len(copied):
            continue
        if shape not in shapes:
            name = "shape_" + "_".join(map(str, shape))
            shapes[shape] = _initializer(model, name, np.array(shape, np.int64))
        node.replace_input_with(1, shapes[shape])
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def transpose_weights(model: ir.Model, linked: Callable[[ir.Value], bool] | None = None) -> None:
    """Store a weight transposed where only one Transpose reads it.

    A weight that something else reads too (an embedding tied to lm_head) keeps its Transpose, so that the
    file holds it once; so does one that is `linked`, whose bytes stay as they are where they are.
    Runtimes fold those when they load the graph.
    """
    graph = model.graph
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Transpose" else None
        if source is None or not source.is_initializer() or len(source.uses()) != 1:
            continue
        if linked is not None and linked(source):
            continue
        axes = tuple(node.attributes["perm"].as_ints())
        weight = register(model, stream(source.const_value).permuted(f"{source.name}.T", axes))
        node.outputs[0].replace_all_uses_with(weight)
        graph.remove(node, safe=True)
        del graph.initializers[source.name]


def merge_products(model: ir.Model) -> None:
    """Make one MatMul of several that multiply the same rows with different weights (q, k, v; gate, up).

    The weights are joined side by side and the product is split again. Each column is the same sum as before.
    """
    groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type != "MatMul" or node.inputs[0] is None or node.inputs[1] is None:
            continue
        weight = node.inputs[1]
        if weight.is_initializer() and len(weight.uses()) == 1 and len(_shape(weight)) == 2:
            groups[node.inputs[0]].append(node)
    for rows, nodes in groups.items():
        if len(nodes) > 1:
            _merge(model, rows, nodes)


def _merge(model: ir.Model, rows: ir.Value, nodes: Sequence[ir.Node]) -> None:
    weights = [node.inputs[1] for node in nodes]
    tensors = [weight.const_value for weight in weights]
    widths = [int(tensor.shape[1]) for tensor in tensors]
    dtype = tensors[0].dtype

    parts = [part for tensor in tensors for part in stream(tensor).parts]
    name = "+".join(weight.name for weight in weights)
    joined = register(model, Streamed(name, parts, BY_ONNX[dtype].torch))
    key = "widths_" + "_".join(map(str, widths))
    sizes = model.graph.initializers.get(key) or _initializer(model, key, np.array(widths, np.int64))
    scope = _joined_scope([_scope(node) for node in nodes])
    product = ir.node("MatMul", [rows, joined], metadata_props=scope)
    split = ir.node(
        "Split", [product.outputs[0], sizes], {"axis": -1}, num_outputs=len(nodes), metadata_props=scope
    )
    model.graph.insert_before(nodes[0], [product, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        part.shape, part.dtype = node.outputs[0].shape, dtype
        node.outputs[0].replace_all_uses_with(part, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    for weight in weights:
        del model.graph.initializers[weight.name]


def _scope(node: ir.Node) -> str:
    """The innermost module around a node, "module.model.model.layers.0.mlp"; "" where there is none."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))[:-1]  # the last is the operation itself
    named = [scope for scope in scopes if scope == "module" or scope.startswith("module.")]
    return named[-1] if named else ""


def _joined_scope(scopes: Sequence[str]) -> dict[str, str]:
    """Metadata of what takes the place of nodes in several modules: self_attn.q_proj+k_proj+v_proj."""
    scopes = list(dict.fromkeys(scopes))
    joined, parents = "+".join(scopes), {scope.rpartition(".")[0] for scope in scopes}
    if len(scopes) > 1 and len(parents) == 1:
        joined = f"{parents.pop()}." + "+".join(scope.rpartition(".")[2] for scope in scopes)
    return {_SCOPES: repr([joined, ""])}


def _copied_size(source: ir.Shape, axis: int, dim: int | ir.SymbolicDim) -> int | None:
    if isinstance(dim, int):
        return dim
    return 0 if axis < len(source) and str(source[axis]) == str(dim) else None


def _initializer(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    return register(model, ir.tensor(array, name=name))


def register(model: ir.Model, tensor: ir.TensorProtocol) -> ir.Value:
    """An initializer of the graph, named as its tensor."""
    value = ir.Value(
        name=tensor.name,
        shape=ir.Shape(tensor.shape),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    model.graph.register_initializer(value)
    return value


def _rename(values: Sequence[ir.Value], names: Sequence[str], kind: str) -> None:
    if len(values) != len(names):
        raise EagleError(f"the traced graph has {len(values)} {kind}s, expected {len(names)}: {list(names)}")
    for value, name in zip(values, names, strict=True):
        value.name = name


def _shape(value: ir.Value) -> ir.Shape:
    if value.shape is None:
        raise EagleError(f"the tracer gave no shape for {value.name}")
    return value.shape
