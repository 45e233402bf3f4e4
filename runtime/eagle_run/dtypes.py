"""The element types of tensors, and what each library calls them: the one table of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """One element type. `name` is torch's, NumPy's (or ml_dtypes', where NumPy lacks it), and of manifests.

    bytes: of one element. onnx: the number in TensorProto.DataType, and onnx_ir's. safetensors, tensorrt:
    their names; "" where they have none. precision: what a target of this type is called, or "".
    """

    name: str
    bytes: int
    onnx: int
    safetensors: str
    tensorrt: str
    precision: str = ""

    @property
    def onnxruntime(self) -> str:
        """The name in ONNX Runtime's signatures: "tensor(float)"."""
        own = {"float32": "float", "float64": "double"}.get(self.name, self.name.replace("8_", "8"))
        return f"tensor({own})"

    @property
    def torch(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float64", 8, 11, "F64", ""),
        DType("float32", 4, 1, "F32", "FLOAT", "fp32"),
        DType("float16", 2, 10, "F16", "HALF", "fp16"),
        DType("bfloat16", 2, 16, "BF16", "BF16", "bf16"),
        DType("float8_e4m3fn", 1, 17, "F8_E4M3", "FP8", "fp8"),
        DType("float8_e5m2", 1, 19, "F8_E5M2", ""),
        DType("int64", 8, 7, "I64", "INT64"),
        DType("int32", 4, 6, "I32", "INT32"),
        DType("int16", 2, 5, "I16", ""),
        DType("int8", 1, 3, "I8", "INT8"),
        DType("uint8", 1, 2, "U8", "UINT8"),
        DType("bool", 1, 9, "BOOL", "BOOL"),
    )
}
BY_PRECISION = {dtype.precision: dtype for dtype in DTYPES.values() if dtype.precision}
BY_ONNX = {dtype.onnx: dtype for dtype in DTYPES.values()}
BY_ONNXRUNTIME = {dtype.onnxruntime: dtype for dtype in DTYPES.values()}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}
GRAPH_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")  # of a graph's inputs and outputs


def dtype_of(dtype: torch.dtype) -> DType:
    """The entry of a torch dtype; KeyError for one that is not in the table."""
    return DTYPES[str(dtype).removeprefix("torch.")]
