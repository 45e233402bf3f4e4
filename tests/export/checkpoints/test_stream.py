"""Weights that are written block by block, against NumPy on whole tensors."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_export.checkpoints import stored as places
from eagle_export.checkpoints import weight_stream as module
from eagle_export.checkpoints.stored import StoredTensor, all_finite, marked, stored_tensor_of, stored_tensors
from eagle_export.checkpoints.weight_stream import InMemory, Streamed, as_numpy, bind, stream
from eagle_run.errors import EagleError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 64)  # bytes: a row or two


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def stored(tensor: torch.Tensor, folder: Path) -> StoredTensor:
    """The tensor in a file, behind another one, so that its offset is not the header's end."""
    save_file({"a": drawn(3, dtype=tensor.dtype), "w": tensor.contiguous()}, folder / "w.safetensors")
    return stored_tensors(folder / "w.safetensors")["w"]


def written(tensor: ir.TensorProtocol) -> bytes:
    """What ends up in a file; every other way to the values must agree."""
    file = io.BytesIO()
    tensor.tofile(file)
    assert tensor.tobytes() == file.getvalue() == tensor.numpy().tobytes()
    assert len(file.getvalue()) == tensor.nbytes
    return file.getvalue()


@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("held", DTYPES, ids=str)
@pytest.mark.parametrize("axes", [None, (1, 0)], ids=["plain", "transposed"])
def test_a_weight_is_converted_and_transposed_as_torch_does(
    tmp_path: Path, held: torch.dtype, wanted: torch.dtype, axes: tuple[int, ...] | None
) -> None:
    tensor = drawn(7, 5, dtype=held)
    expected = as_numpy((tensor if axes is None else tensor.T).to(wanted).contiguous())
    for weight in (InMemory(tensor), stored(tensor, tmp_path)):
        found = Streamed("w", [(weight, axes)], wanted)
        assert len(list(found.blocks())) > 1
        assert found.shape == ir.Shape(expected.shape)
        assert written(found) == expected.tobytes()


def test_weights_stand_side_by_side(tmp_path: Path) -> None:
    q, k, v = drawn(4, 6), drawn(2, 6, dtype=torch.float16), drawn(6, 3)
    parts = [(stored(q, tmp_path), (1, 0)), (InMemory(k), (1, 0)), (InMemory(v), None)]
    expected = np.concatenate([q.numpy().T, k.float().numpy().T, v.numpy()], axis=1)
    assert written(Streamed("qkv", parts, torch.float32)) == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 0, 1), (0, 1, 2)])
def test_any_axes_may_be_exchanged_twice(axes: tuple[int, ...]) -> None:
    experts = drawn(3, 4, 5)
    once = Streamed("experts", [(InMemory(experts), None)], torch.float32).permuted("x", axes)
    assert written(once) == np.ascontiguousarray(experts.numpy().transpose(axes)).tobytes()
    again = once.permuted("y", (1, 0, 2))
    assert written(again) == np.ascontiguousarray(once.numpy().transpose(1, 0, 2)).tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (1, 3)])
def test_odd_shapes_are_written_too(shape: tuple[int, ...]) -> None:
    tensor = drawn(*shape)
    assert (
        written(Streamed("w", [(InMemory(tensor), None)], torch.float16)) == tensor.half().numpy().tobytes()
    )


def test_only_what_a_file_holds_as_it_is_has_a_place(tmp_path: Path) -> None:
    tensor = drawn(4, 8)
    weight = stored(tensor, tmp_path)
    plain = Streamed("w", [(weight, None)], torch.float32)
    file_range = plain.file_range
    assert file_range is not None
    raw = file_range.file.read_bytes()[file_range.offset : file_range.offset + file_range.length]
    assert raw == tensor.numpy().tobytes()
    assert plain.permuted("t", (1, 0)).permuted("w", (1, 0)).file_range == file_range
    assert plain.permuted("t", (1, 0)).file_range is None
    assert Streamed("w", [(weight, None)], torch.float16).file_range is None
    assert Streamed("w", [(weight, None)] * 2, torch.float32).file_range is None
    assert Streamed("w", [(InMemory(tensor), None)], torch.float32).file_range is None


def test_a_place_that_splits_a_number_is_none() -> None:
    assert StoredTensor(Path("f"), "w", 13, (2,), torch.float32).file_range is None


def test_what_fp16_cannot_hold_is_an_error() -> None:
    wide = InMemory(torch.tensor([[1.0, 70000.0]]))
    with pytest.raises(EagleError, match=r"w holds values that fp16 cannot") as caught:
        written(Streamed("w", [(wide, (1, 0))], torch.float16))
    assert "bf16" in caught.value.hint
    written(Streamed("w", [(wide, None)], torch.bfloat16))


def test_a_trace_without_weights_gets_them_by_name() -> None:
    empty = torch.empty(2, 3, dtype=torch.float16, device="meta")
    wanted = drawn(2, 3)
    model = traced({"w": empty, "own": drawn(2)})
    bind(model, {"w": InMemory(wanted), "other": InMemory(wanted)})
    assert written(model.graph.initializers["w"].const_value) == wanted.half().numpy().tobytes()
    for weights in ({}, {"w": InMemory(drawn(3, 2))}):
        with pytest.raises(EagleError, match=r"needs a weight w \[2, 3\], found"):
            bind(traced({"w": empty}), weights)


def traced(tensors: dict[str, torch.Tensor]) -> ir.Model:
    """A graph with these initializers, as the exporter holds them."""
    from onnx_ir.tensor_adapters import TorchTensor

    held = [ir.Value(name=name, const_value=TorchTensor(value, name=name)) for name, value in tensors.items()]
    return ir.Model(ir.Graph([], [], nodes=[], initializers=held, opset_imports={"": 24}), ir_version=11)


def test_every_kind_of_initializer_becomes_a_stream() -> None:
    array = drawn(3, 2).numpy()
    for tensor in (
        ir.tensor(array, name="w"),
        ir.LazyTensor(lambda: ir.tensor(array), dtype=ir.DataType.FLOAT, shape=ir.Shape([3, 2]), name="w"),
        Streamed("w", [(InMemory(torch.from_numpy(array)), None)], torch.float32),
    ):
        assert written(stream(tensor).permuted("t", (1, 0))) == np.ascontiguousarray(array.T).tobytes()
    half = drawn(3, 2, dtype=torch.bfloat16)
    found = stream(ir.tensor(as_numpy(half), dtype=ir.DataType.BFLOAT16, name="w"))
    assert written(found) == as_numpy(half).tobytes()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    weight = stored(drawn(40, 40), tmp_path)
    whole = weight.file.read_bytes()
    weight.file.write_bytes(whole[:-100])
    with pytest.raises(EagleError, match=r"ends within w"):
        weight.load()
    assert torch.equal(weight.rows(3, 5), drawn(40, 40)[3:5])  # those are still there
    weight.file.unlink()
    with pytest.raises(EagleError, match=r"cannot be read: No such file"):
        weight.load()
    for content in (b"", whole[:20], b"\x02" + bytes(7) + b"[]", whole.replace(b"[40,40]", b"[40,41]")):
        weight.file.write_bytes(content)
        with pytest.raises(EagleError, match=r"not a whole safetensors file"):
            stored_tensors(weight.file)
    weight.file.write_bytes(whole.replace(b'"F32"', b'"F4X"'))
    with pytest.raises(EagleError, match=r"is stored as F4X"):
        stored_tensors(weight.file)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_know_where_they_are_from_until_they_are_changed(tmp_path: Path, dtype: torch.dtype) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"w": drawn(5, 4, dtype=dtype), "d": drawn(3).to(torch.int64)}, file)
    found = marked(load_file(file), file)
    for name, tensor in found.items():
        stored = stored_tensor_of(tensor)
        assert stored is not None
        assert torch.equal(stored.load(), tensor), name
    assert stored_tensor_of(found["w"] * 2) is None
    assert all_finite(found["w"])


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_one_value_that_is_no_number_is_found(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_ROWS", 8)
    for dtype in DTYPES:
        for where in (0, 13, 29):
            values = drawn(10, 3, dtype=dtype)
            assert all_finite(values)
            values.view(-1)[where] = odd
            assert not all_finite(values)
    assert not all_finite(torch.tensor(odd))
    assert all_finite(torch.empty(0, 3))
