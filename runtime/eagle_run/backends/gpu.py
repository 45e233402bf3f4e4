"""The GPU that decodes: which one it is, and the stream that its work goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eagle_run.errors import EagleError

_DOCTOR = "`eagle-export doctor` shows what this machine has"


@dataclass(frozen=True)
class Gpu:
    """A GPU. `capability`: of compute, "8.9". `stream`: gives the handle of torch's current stream.

    Engines take device, capability and stream from here and ask CUDA nothing.
    """

    device: torch.device
    capability: str
    name: str
    stream: Callable[[], int]


def find_gpu() -> Gpu | None:
    """The GPU that torch would use (the first that CUDA_VISIBLE_DEVICES shows), or None."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(
        device,
        f"{major}.{minor}",
        torch.cuda.get_device_name(device),
        lambda: int(torch.cuda.current_stream(device).cuda_stream),
    )


def need_gpu(backend: str) -> Gpu:
    """The GPU, or an EagleError that says why there is none for `backend`."""
    gpu = find_gpu()
    if gpu is not None:
        return gpu
    if torch.version.cuda is None:
        raise EagleError(
            f"{backend} needs an NVIDIA GPU, but torch {torch.__version__} is built without CUDA",
            hint=f"install a torch build for CUDA (see https://pytorch.org/get-started); {_DOCTOR}. "
            "Without a GPU, the device cpu runs the bundle's ONNX graphs",
            parameters=["device"],
        )
    raise EagleError(
        f"{backend} needs an NVIDIA GPU, and torch (for CUDA {torch.version.cuda}) finds none",
        hint=f"install or update the NVIDIA driver (`nvidia-smi` must list the GPU); {_DOCTOR}. "
        "Without a GPU, the device cpu runs the bundle's ONNX graphs",
        parameters=["device"],
    )
