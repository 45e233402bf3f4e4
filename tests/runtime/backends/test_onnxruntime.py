"""The ONNX Runtime backend: what it binds, and what it refuses to bind or load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from eagle_run.backends import onnxruntime as backend
from eagle_run.backends.checks import check_tensors
from eagle_run.backends.onnxruntime import OnnxRuntimeGraph
from eagle_run.dtypes import DTYPES
from eagle_run.errors import EagleError

SIZES = {"B": 1, "T": 2, "R": 1, "KV": 16}


@pytest.fixture(scope="module")
def graph(tiny_bundle: Path) -> OnnxRuntimeGraph:
    return OnnxRuntimeGraph(tiny_bundle / "onnx/target.onnx", "target", threads=1)


def tensors(graph: OnnxRuntimeGraph) -> dict[str, torch.Tensor]:
    found = {}
    for spec in (*graph.spec.inputs, *graph.spec.outputs):
        shape = [SIZES[axis] if isinstance(axis, str) else axis for axis in spec.shape]
        found[spec.name] = torch.zeros(shape, dtype=DTYPES[spec.dtype].torch)
    for name in [key for key in found if key.startswith("present_")]:
        found[name] = found[name.replace("present", "past")]
    found["tree_mask"].fill_(True)
    return found


def test_runs_read_and_write_the_bound_memory(graph: OnnxRuntimeGraph) -> None:
    bound = tensors(graph)
    run = graph.bind(bound)
    run()
    first = bound["logits"].clone()
    bound["input_ids"].fill_(7)
    run()
    assert not torch.equal(bound["logits"], first)
    assert bound["past_key.0"].abs().sum() > 0  # the cache is written in place


def test_the_binding_keeps_its_tensors_alive(graph: OnnxRuntimeGraph) -> None:
    undisturbed = tensors(graph)
    graph.bind(undisturbed)()
    bound = tensors(graph)
    logits = bound["logits"]
    run = graph.bind(bound)
    shapes = [tensor.shape for tensor in bound.values()]
    del bound
    churn = [torch.full(shape, 1e9) for shape in shapes * 4]  # would land in freed memory
    run()
    assert torch.equal(logits, undisturbed["logits"]), len(churn)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("logits", None, "no tensor given for logits"),
        ("surprise", torch.zeros(1), "no tensor named surprise"),
        ("input_ids", torch.zeros(1, 2), "expected int64, found torch.float32"),
        ("input_ids", torch.zeros(2, dtype=torch.int64), r"expected shape \['B', 'T'\], found \[2\]"),
        (
            "tree_mask",
            torch.ones(1, 1, 3, 16, dtype=torch.bool),
            r"expected T = 2, found shape \[1, 1, 3, 16\]",
        ),
        ("position_ids", torch.zeros(2, 1, dtype=torch.int64).T.expand(2, 2), "expected B = 1"),
    ],
)
def test_wrong_tensors_are_refused(
    graph: OnnxRuntimeGraph, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    bound = tensors(graph)
    if tensor is None:
        del bound[name]
    else:
        bound[name] = tensor
    with pytest.raises(EagleError, match=words):
        graph.bind(bound)


def test_a_strided_tensor_is_refused(graph: OnnxRuntimeGraph) -> None:
    bound = tensors(graph)
    bound["position_ids"] = torch.zeros(1, 4, dtype=torch.int64)[:, ::2]
    with pytest.raises(EagleError, match="position_ids: the tensor is not contiguous"):
        check_tensors(graph.spec, bound)


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_a_damaged_file_is_refused(tiny_bundle: Path, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "target.onnx"
    whole = (tiny_bundle / "onnx/target.onnx").read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(EagleError, match=r"cannot load .*target\.onnx"):
        OnnxRuntimeGraph(file, "target")


def test_cuda_without_a_cuda_build_says_what_to_install(tiny_bundle: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(EagleError, match="no CUDA provider") as caught:
        OnnxRuntimeGraph(tiny_bundle / "onnx/target.onnx", "target", device="cuda")
    assert "onnxruntime-gpu" in caught.value.hint


class Gpuless:
    """An onnxruntime-gpu whose CUDA provider cannot be loaded: it logs that, and takes the CPU."""

    __version__ = "1.32.0"
    cuda_version = "13.0"
    asked: list[Any] = []  # noqa: RUF012 - what the session was made with

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def preload_dlls(self) -> None:
        print("Failed to load libcudnn.so.9: cannot open shared object file")

    def InferenceSession(self, path: str, *, sess_options: Any, providers: Any) -> Any:
        self.asked.append(providers)
        return onnxruntime.InferenceSession(path, sess_options, ["CPUExecutionProvider"])


def test_a_silent_fallback_to_the_cpu_is_an_error(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stream:
        cuda_stream = 4711

    monkeypatch.setattr(backend, "_import_onnxruntime", Gpuless)
    monkeypatch.setattr(backend, "stream_of", lambda device: Stream())
    lacking = r"has a CUDA provider, but cannot load it: .*libcudnn\.so\.9"
    with pytest.raises(EagleError, match=lacking) as caught:
        OnnxRuntimeGraph(tiny_bundle / "onnx/target.onnx", "target", device="cuda:1")
    assert "onnxruntime-gpu[cuda,cudnn]" in caught.value.hint
    assert "CUDA 13.0" in caught.value.hint
    assert capsys.readouterr().out == ""  # stdout is for the answer
    (name, options), last = Gpuless.asked[-1]
    assert (name, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert (options["user_compute_stream"], options["device_id"]) == ("4711", "1")
    assert (options["use_tf32"], options["enable_cuda_graph"]) == ("0", "0")
