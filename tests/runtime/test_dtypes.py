"""The one table of element types: every library's name in it is that library's own."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save

from eagle_run.dtypes import BY_ONNX, BY_ONNXRUNTIME, BY_PRECISION, BY_SAFETENSORS, DTYPES, dtype_of


@pytest.mark.parametrize("name", DTYPES)
def test_a_name_is_every_librarys_own(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype.torch.itemsize == dtype.bytes
    assert dtype_of(dtype.torch) is dtype
    assert np.dtype(getattr(ml_dtypes, name, None) or name).itemsize == dtype.bytes
    assert ir.DataType(dtype.onnx).itemsize == dtype.bytes
    assert onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx).name == name
    header = save({"x": torch.zeros(1, dtype=dtype.torch)})
    assert f'"dtype":"{dtype.safetensors}"'.encode() in header[: 8 + struct.unpack("<Q", header[:8])[0]]


def test_every_table_finds_what_it_is_asked_for() -> None:
    for table in (BY_ONNX, BY_ONNXRUNTIME, BY_SAFETENSORS):
        assert list(table.values()) == list(DTYPES.values())  # no two have one name
    assert {name: dtype.name for name, dtype in BY_PRECISION.items()} == {
        "fp32": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp8": "float8_e4m3fn",
    }
    with pytest.raises(KeyError):
        dtype_of(torch.complex64)


@pytest.mark.parametrize("name", DTYPES)
def test_onnxruntime_calls_it_so(name: str, tmp_path: Path) -> None:
    """A graph that passes a tensor on."""
    ort = pytest.importorskip("onnxruntime")
    values = [onnx.helper.make_tensor_value_info(side, DTYPES[name].onnx, [1]) for side in "xy"]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "g.onnx")
    session = ort.InferenceSession(str(tmp_path / "g.onnx"), providers=["CPUExecutionProvider"])
    assert BY_ONNXRUNTIME[session.get_inputs()[0].type] is DTYPES[name]
