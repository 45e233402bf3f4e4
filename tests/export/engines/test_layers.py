"""The layer list as the compiler prints it (names and sizes shortened)."""

from __future__ import annotations

import pytest

from eagle_export.engines.layers import LayerLog, parse_layers


def tensor(shape: str, dtype: str, name: str = "x") -> str:
    return (
        f"{{ Name: {name}, Dimensions: [{shape}], Strides: [1], StrideOrder: [0], Datatype: {dtype}, "
        "Format: (Linear) Row major linear format }"
    )


def layer(name: str, kind: str, inputs: list[str], constants: list[str], *nodes: str) -> str:
    metadata = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [ {', '.join(inputs)}], Constants: "
        f"[ {', '.join(constants)}], Outputs: [ {tensor('-1,64', 'Half')}], TacticName: t, StreamId: 0, "
        f"Metadata: {metadata}"
    )


ROWS, MASK = tensor("-1,64", "Half"), tensor("-1,1,-1,-1", "Bool", "tree_mask")
ALPHA = tensor("1", "Float")
FIRST = [
    layer("__mye1_myl0_0", "shape_call", [], []),
    layer("l0.qkv/MatMul_myl0_1", "gemm", [ROWS], [tensor("64,128", "Half"), ALPHA], "l0.qkv/MatMul"),
    layer("_gemm_mha_v2_myl0_2", "kgen", [ROWS, ROWS, MASK], [], "l0/Attention"),
    layer("__myl_FcAdd_myl0_3", "runtime_fusion", [ROWS, ROWS], [tensor("64,64", "Half")], "l0.o/MatMul"),
]
SECOND = [
    layer("__myl_Cast_myl1_0", "kgen", [ROWS, tensor("-1", "Half", "y [profile 1]")], [], "l0.qkv/MatMul.q"),
    layer(
        "l0.qkv/MatMul [profile 1]_myl1_1",
        "gemm",
        [tensor("-1,64", "FP8")],
        [tensor("64,128", "FP8"), ALPHA],
        "l0.qkv/MatMul",
        "l0.qkv/MatMul.dq",
    ),
    layer("_gemv_mha_v1_myl1_2", "kgen", [ROWS, MASK], [], "l0/Attention"),
    layer("__myl_CastFc_myl1_3", "runtime_fusion", [ROWS], [tensor("64,64", "FP8")], "l0.o/MatMul"),
]
SCRATCH = [
    "Layer: {ForeignNode[a...b]} Host Persistent: 80 bytes Scratch Memory: 300 bytes",
    "Layer: small Host Persistent: 8 bytes Device Persistent: 0 bytes Scratch Memory: 20 bytes",
    "Layer: {ForeignNode[a...b]} [profile 1] Host Persistent: 8 bytes Scratch Memory: 7 bytes",
    "Skipped printing memory information for 0 layers with Scratch Memory == 0.",
]
MATMULS = {"l0.qkv/MatMul", "l0.o/MatMul"}


def collected(*messages: str) -> LayerLog:
    log = LayerLog()
    for message in ("Parsing node: l0/Attention", *messages, "I/O Tensors:"):
        log.add(message)
    return log


def test_one_list_for_two_profiles() -> None:
    log = collected("Layers:\n" + "\n".join(FIRST + SECOND), *SCRATCH)
    first, second = log.summaries(2, MATMULS)
    assert first is not None
    assert second is not None
    assert (first.kernels, first.attention, first.gemms) == (3, {"_gemm_mha_v2": 1}, {"fp16": 2})
    assert (second.kernels, second.attention) == (4, {"_gemv_mha_v1": 1})
    assert second.gemms == {"fp8": 1, "fp16xfp8": 1}  # the second is weight-only, inside a fusion
    assert (first.scratch_bytes, second.scratch_bytes) == (300, 7)


def test_what_is_read_of_a_layer() -> None:
    found = list(parse_layers(FIRST + SECOND))
    assert [one.profile for one in found] == [0] * 4 + [1] * 4
    qkv = found[1]
    assert (qkv.name, qkv.kind, qkv.nodes) == ("l0.qkv/MatMul_myl0_1", "gemm", ("l0.qkv/MatMul",))
    assert (qkv.inputs[0].shape, qkv.inputs[0].dtype) == ((-1, 64), "fp16")
    assert [one.shape for one in qkv.constants] == [(64, 128), (1,)]


def test_the_added_tensor_of_a_fusion_is_no_operand() -> None:
    fused = layer(
        "__myl_FcAdd_myl0_0",
        "runtime_fusion",
        [tensor("-1,64", "Half"), tensor("-1,96", "FP8")],
        [tensor("96,64", "FP8")],
        "l0.o/MatMul",
    )
    (summary,) = collected(fused).summaries(1, MATMULS)
    assert summary is not None
    assert summary.gemms == {"fp8": 1}


def test_weights_that_are_converted_beforehand() -> None:
    both = layer(
        "l0.o/MatMul_myl0_1", "gemm", [ROWS, tensor("64,64", "Half")], [tensor("1", "Float")], "l0.o/MatMul"
    )
    (summary,) = collected(both).summaries(1, MATMULS)
    assert summary is not None
    assert summary.gemms == {"fp16": 1}


@pytest.mark.parametrize(
    ("messages", "profiles"), [((), 1), (("\n".join(FIRST),), 2), (("\n".join(FIRST + SECOND),), 1)]
)
def test_a_list_that_does_not_fit_is_not_guessed_at(messages: tuple[str, ...], profiles: int) -> None:
    assert collected(*messages).summaries(profiles, MATMULS) == (None,) * profiles
