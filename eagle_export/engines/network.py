"""Reads an ONNX file into a compiler's network, and checks that nothing was lost on the way.

TensorRT's parser leaves out silently what it does not implement: an input of Attention that says how many
keys are valid, a mask of another width. Such an engine builds, and decodes wrongly. So the network that came
out is compared with the graph that went in.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export.engines.attention import check_attention
from eagle_run.backends.library import declared
from eagle_run.errors import EagleError, first_line

if TYPE_CHECKING:
    from eagle_run.backends.library import Library
    from eagle_run.bundle.tensors import GraphSpec

# Operators that must come out as one layer each, and of which kind.
NATIVE = {
    "Attention": "ATTENTION_INPUT",
    "TensorScatter": "KV_CACHE_UPDATE",
    "RotaryEmbedding": "ROTARY_EMBEDDING",
    "MatMul": "MATRIX_MULTIPLY",
    "QuantizeLinear": "QUANTIZE",
    "DequantizeLinear": "DEQUANTIZE",
}
_MASK_INPUT = 3  # query, key, value, mask
_REPORT = "export the graph again; if it stays, please report it with the versions that `doctor` prints"


def parse(library: Library, builder: Any, logger: Any, path: Path) -> Any:
    """The strongly typed network of the file at `path`: types are those of the graph, whatever is faster.

    Raises EagleError, naming the node (and so the layer of the model), for what the parser cannot read. The
    parser is kept alive by the network's owner: it returns (network, parser).
    """
    trt = library.module
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # later versions know no other
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise _parser_error(library, path, errors)
    return network, parser


def load_graph(path: Path) -> Any:
    """The ONNX graph at `path`, without its weights. Raises EagleError for what is no ONNX file."""
    import onnx

    try:
        return onnx.load(path, load_external_data=False).graph
    except Exception as error:  # protobuf raises its own classes for a damaged file
        raise EagleError(
            f"{path} is not an ONNX file: {first_line(error)}", hint="export it again"
        ) from error


def check_network(library: Library, network: Any, graph: Any, path: Path, spec: GraphSpec) -> dict[str, int]:
    """Compare a parsed network with its ONNX graph and with the signature that it must have.

    The graph: each Attention takes the tree mask, keys and values of that mask's width, and nothing that
    says otherwise (see `attention.check_attention`). The network: its inputs and outputs are those of `spec`
    by name, dtype and shape; every input is read; there are as many native layers of each kind as nodes, and
    as many cache updates as the model has caches; every attention layer has its mask and no causal rule of
    its own.

    Returns the number of layers by kind. Raises EagleError for the first thing that differs.
    """
    written = check_attention(graph, path)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    kinds = Counter(layer.type.name for layer in layers)
    _check_signature(network, path, spec)
    _check_inputs_read(layers, network, path)
    _check_native(kinds, graph, path, spec, written)
    _check_masks(library.module, layers, path)
    return dict(kinds)


def decompose_attention(library: Library, network: Any) -> None:
    """Lets the compiler take attention apart where it has no fused kernel."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = library.module.IAttentionInputLayer
            layer.attention.decomposable = True


def _parser_error(library: Library, path: Path, errors: list[Any]) -> EagleError:
    if not errors:
        return EagleError(f"{path}: {library.backend} cannot read it and does not say why", hint=_REPORT)
    error = errors[0]
    name, operator = error.node_name(), error.node_operator()
    module = name.rpartition("/")[0]
    layer = f" of the model's layer {module}" if module else ""
    where = f"node {name!r} ({operator}){layer}: " if name or operator else ""
    return EagleError(
        f"{path}: {library.label} cannot read {where}{' '.join(error.desc().split())}",
        hint=f"this version may lack the operator; a newer {library.backend} may have it. {_REPORT}",
    )


def _check_signature(network: Any, path: Path, spec: GraphSpec) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    for side, tensors, specs in (("inputs", inputs, spec.inputs), ("outputs", outputs, spec.outputs)):
        parsed = [(tensor.name, tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors]
        expected = [(tensor.name, *declared(tensor)) for tensor in specs]
        if parsed != expected:
            pairs = zip(parsed, expected, strict=False)
            wrong = [f"{mine} instead of {theirs}" for mine, theirs in pairs if mine != theirs]
            detail = wrong[0] if wrong else "some are missing or too many"
            raise EagleError(
                f"{path}: the compiler sees {len(parsed)} {side}, expected {len(expected)}; {detail}",
                hint=_REPORT,
            )


def _check_inputs_read(layers: list[Any], network: Any, path: Path) -> None:
    read = set()
    for layer in layers:
        tensors = [layer.get_input(i) for i in range(layer.num_inputs)]
        read |= {tensor.name for tensor in tensors if tensor is not None}
    names = [network.get_input(i).name for i in range(network.num_inputs)]
    unread = [name for name in names if name not in read]
    if unread:
        raise EagleError(
            f"{path}: the compiler dropped what reads {', '.join(unread)}; the engine would ignore it",
            hint=_REPORT,
        )


def _check_native(kinds: Counter[str], graph: Any, path: Path, spec: GraphSpec, written: int) -> None:
    """`written`: attentions that are written out as products, and so are no layer of their own."""
    nodes = Counter(node.op_type for node in graph.node)
    for operator, kind in NATIVE.items():
        if kinds[kind] != nodes[operator]:
            raise EagleError(
                f"{path}: {nodes[operator]} {operator} nodes became {kinds[kind]} {kind} layers, "
                "expected one each",
                hint=_REPORT,
            )
    caches = sum(tensor.name.startswith("past_") for tensor in spec.inputs)
    if kinds["KV_CACHE_UPDATE"] != caches or kinds["ATTENTION_INPUT"] + written != caches // 2:
        raise EagleError(
            f"{path}: {caches} KV caches, but {kinds['KV_CACHE_UPDATE']} cache updates and "
            f"{kinds['ATTENTION_INPUT'] + written} attention layers in the network",
            hint=_REPORT,
        )


def _check_masks(trt: Any, layers: list[Any], path: Path) -> None:
    for layer in layers:
        if layer.type.name != "ATTENTION_INPUT":
            continue
        mask = layer.get_input(_MASK_INPUT) if layer.num_inputs > _MASK_INPUT else None
        if mask is None:
            raise EagleError(f"{path}: attention layer {layer.name} came out without a mask", hint=_REPORT)
        layer.__class__ = trt.IAttentionInputLayer  # the bindings give out the base class
        causal = getattr(layer.attention, "causal_kind", None)
        if layer.attention.causal or (causal is not None and causal.name != "NONE"):
            raise EagleError(
                f"{path}: attention layer {layer.name} came out causal, beside its mask", hint=_REPORT
            )
