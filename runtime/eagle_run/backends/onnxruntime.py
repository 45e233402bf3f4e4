"""Runs a plain ONNX graph in ONNX Runtime, on caller-owned memory through IO binding.

The KV cache is updated in place: `past_key.i` and `present_key.i` are bound to the same address, which
ONNX Runtime's TensorScatter recognises and then writes only the new rows.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_run.backends.base import Run
from eagle_run.backends.checks import check_tensors
from eagle_run.backends.environment import thread_count
from eagle_run.backends.stream import stream_of
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.dtypes import BY_ONNXRUNTIME, DTYPES
from eagle_run.errors import EagleError, first_line

_CUDA = "CUDAExecutionProvider"


class OnnxRuntimeGraph:
    """A graph in an ONNX Runtime session. `device` is "cpu", "cuda" or "cuda:0" (needs onnxruntime-gpu).

    `threads` is the number of threads inside an operator on a CPU; 0 means one per core. Raises UsageError
    for more threads than cores, and EagleError when the file cannot be loaded, and when the CUDA provider or
    what it needs is missing.
    """

    capturable = False  # it manages memory and waits on its own while it runs

    def __init__(self, path: Path, name: str, *, device: str = "cpu", threads: int = 0) -> None:
        threads = thread_count(threads)
        ort = _import_onnxruntime()
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        lacking = _preload(ort) if on_gpu else ""
        providers = _providers(ort, self._device)
        try:
            self._session = ort.InferenceSession(
                str(path), sess_options=_options(ort, threads), providers=providers
            )
        except Exception as error:  # onnxruntime raises a dozen unrelated classes, all without a common base
            raise EagleError(
                f"ONNX Runtime {ort.__version__} cannot load {path}: {first_line(error)}",
                hint="the file may be damaged or newer than this ONNX Runtime; build the bundle again",
            ) from error
        if on_gpu and _CUDA not in self._session.get_providers():  # it takes the CPU and only logs that
            raise _no_cuda(ort, lacking)
        self._spec = GraphSpec(
            name,
            tuple(_tensor_spec(value) for value in self._session.get_inputs()),
            tuple(_tensor_spec(value) for value in self._session.get_outputs()),
        )
        self._run_options = ort.RunOptions()
        if on_gpu:  # all work is on one stream, so nothing has to wait for its end
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @property
    def spec(self) -> GraphSpec:
        return self._spec

    def bind(self, tensors: Mapping[str, torch.Tensor], *, shared: bool = False) -> Run:
        """Binds every input and output to the tensor of its name; the returned call runs the graph on them.

        Raises EagleError for a missing name, another dtype, a static axis of another size, or a tensor that
        is not contiguous.
        """
        check_tensors(self._spec, tensors)
        binding = self._session.io_binding()
        for spec in self._spec.inputs:
            binding.bind_input(*self._place(spec, tensors[spec.name]))
        for spec in self._spec.outputs:
            binding.bind_output(*self._place(spec, tensors[spec.name]))
        session, options = self._session, self._run_options
        kept = tuple(tensors.values())  # the binding holds bare addresses: the tensors must outlive it

        def run(_kept: tuple[torch.Tensor, ...] = kept) -> None:
            session.run_with_iobinding(binding, options)

        return run

    def _place(self, spec: TensorSpec, tensor: torch.Tensor) -> tuple[Any, ...]:
        index = tensor.device.index or 0
        element_type = DTYPES[spec.dtype].onnx  # where NumPy has no such dtype it takes numbers
        return spec.name, self._device.type, index, element_type, list(tensor.shape), tensor.data_ptr()


def _options(ort: Any, threads: int) -> Any:
    options = ort.SessionOptions()
    # Always a number: left to itself ONNX Runtime also pins its threads, which then cannot make way for the
    # thread that calls it (3–4% of a forward on two cores).
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads of a finished run go to sleep at once. Left spinning, those of the draft take the cores away
    # from the target's: on two cores that doubled the time of every verification.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Q/DQ pairs are computed as written. The optimiser would move a DequantizeLinear with a 16-bit output
    # through a reshape and take its type for float32, which then fails the load of an FP8 graph.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def _providers(ort: Any, device: torch.device) -> list[Any]:
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    if _CUDA not in ort.get_available_providers():
        raise EagleError(
            f"onnxruntime {ort.__version__} has no CUDA provider (found {ort.get_available_providers()})",
            hint="`pip uninstall onnxruntime`, then `pip install --force-reinstall onnxruntime-gpu`; "
            "or run on the CPU",
            parameters=["device"],
        )
    stream = stream_of(device)
    assert stream is not None
    options = {
        "device_id": str(torch.cuda.current_device() if device.index is None else device.index),
        # The stream of everything else: without it each run would wait for the whole device.
        "user_compute_stream": str(stream.cuda_stream),
        # Memory grows by what is asked for, not to the next power of two: torch wants the rest.
        "arena_extend_strategy": "kSameAsRequested",
        # Products of an fp32 bundle in fp32: TF32 keeps 10 bits, and greedy answers would differ.
        "use_tf32": "0",
        # Rounds cannot be captured around it, and its own capture knows one set of shapes.
        "enable_cuda_graph": "0",
    }
    return [(_CUDA, options), "CPUExecutionProvider"]


def _preload(ort: Any) -> str:
    """Loads CUDA's libraries from their Python packages; returns what it says of those that are not there."""
    said = io.StringIO()
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(said):
            ort.preload_dlls()
    return "; ".join(line.strip() for line in said.getvalue().splitlines() if "ailed to load" in line)


def _no_cuda(ort: Any, lacking: str) -> EagleError:
    version = getattr(ort, "cuda_version", "") or "its CUDA"
    return EagleError(
        f"onnxruntime {ort.__version__} has a CUDA provider, but cannot load it: "
        f"{lacking or 'most likely the NVIDIA driver is missing or too old'}",
        hint=f"it needs a driver, cuBLAS and cuDNN for CUDA {version}: `nvidia-smi` shows the driver, "
        "`pip install 'onnxruntime-gpu[cuda,cudnn]'` brings the libraries; or run on the CPU",
        parameters=["device"],
    )


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise EagleError(
            f"onnxruntime cannot be imported: {error}", hint="pip install onnxruntime"
        ) from error
    return onnxruntime


def _tensor_spec(value: Any) -> TensorSpec:
    return TensorSpec(value.name, BY_ONNXRUNTIME[value.type].name, tuple(value.shape))
