"""GPU architectures: their names, which of them a backend compiles for, and what the GPU of this machine is.

An architecture is written "sm89" on a command line and "8.9" (compute capability) everywhere else. Nothing
here imports a compiler, so that a wrong option is refused before anything slow.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence

from eagle_run.bundle.engine_backends import MODULES, RTX_CAPABILITIES
from eagle_run.errors import EagleError, UsageError

DEFAULT_CAPABILITIES = ("8.9", "12.0")  # GeForce RTX 40 and 50
# The first capability whose matrix units know a type, and why others do not.
_LEAST = {
    "fp8": ("8.9", "there are no FP8 matrix units before Ada (sm89)"),
    "bf16": ("8.0", "there is no bfloat16 before Ampere (sm80)"),
}
_OUTSIDE_RTX = {
    "9.0": "Hopper (H100, H200)",
    "10.0": "Blackwell datacenter GPUs (B200)",
    "10.3": "Blackwell datacenter GPUs (B300)",
    "8.7": "Jetson Orin",
    "11.0": "Jetson Thor",
    "10.1": "Jetson Thor",
}


def check_architectures(backend: str, precision: str, arches: Sequence[str]) -> tuple[str, ...]:
    """The compute capabilities that an engine will be for, ascending, e.g. ("8.9", "12.0").

    arches: as the user wrote them, "sm89" or "8.9"; empty for the default: sm89 and sm120 for TensorRT-RTX,
    and the GPU of this machine for TensorRT, which compiles for no other.

    Raises UsageError for an architecture that the backend cannot compile for, and for TensorRT when any is
    given; EagleError where TensorRT finds no GPU, and where a GPU lacks the precision's arithmetic.
    """
    if backend not in MODULES:
        raise UsageError(f"engines are compiled for {' or '.join(MODULES)}, found {backend!r}")
    if backend == "tensorrt":
        chosen = _of_this_machine(arches)
    else:
        chosen = tuple(map(_rtx_capability, arches)) or DEFAULT_CAPABILITIES
    ordered = tuple(sorted(set(chosen), key=_number))
    _check_precision(precision, ordered)
    return ordered


def capability(arch: str) -> str:
    """ "sm89" or "8.9" -> "8.9". Raises UsageError for what is neither."""
    text = arch.strip().lower()
    named = re.fullmatch(r"(?:sm|sm_)?(\d{1,2})(\d)", text)
    dotted = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    match = named or dotted
    if not match:
        raise UsageError(
            f"architecture {arch!r}: expected a form like sm89 or 8.9",
            hint=f"TensorRT-RTX compiles for {_list(RTX_CAPABILITIES)}",
            parameters=["target_arch"],
        )
    return f"{match[1]}.{match[2]}"


def arch_name(capability: str) -> str:
    """ "8.9" -> "sm89"."""
    return "sm" + capability.replace(".", "")


def can_compute(precision: str, capability: str) -> bool:
    """Whether GPUs of a compute capability have arithmetic of this precision."""
    return _number(capability) >= _number(_LEAST.get(precision, ("0.0", ""))[0])


def local_capability() -> str | None:
    """The compute capability of the first GPU that CUDA shows to this process; None where it shows none.

    Asked from the driver, without a CUDA toolkit and on every platform, a Jetson too.
    """
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # 75 and 76 are CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h.
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    )
    return None if failed else f"{major.value}.{minor.value}"


def _of_this_machine(arches: Sequence[str]) -> tuple[str, ...]:
    if arches:
        raise UsageError(
            f"target_arch {','.join(arches)}: TensorRT compiles only for the GPU of the machine it runs on",
            hint="leave it out and compile on a machine with that GPU, or compile with tensorrt-rtx",
            parameters=["target_arch", "backend"],
        )
    local = local_capability()
    if local is None:
        raise EagleError(
            "TensorRT compiles on the GPU that the engine is for, and no NVIDIA GPU is found here",
            hint="build for onnxruntime here, copy the bundle to the machine with the GPU and run "
            "`eagle-export compile BUNDLE --backend tensorrt` there; or compile with tensorrt-rtx, which "
            "needs no GPU",
            parameters=["backend"],
        )
    return (local,)


def _rtx_capability(arch: str) -> str:
    gpu = capability(arch)
    if gpu in RTX_CAPABILITIES:
        return gpu
    if gpu in _OUTSIDE_RTX:
        raise UsageError(
            f"target_arch {arch}: TensorRT-RTX does not list {_OUTSIDE_RTX[gpu]}; it compiles for "
            f"{_list(RTX_CAPABILITIES)}",
            hint="use plain TensorRT on that machine: `eagle-export compile BUNDLE --backend tensorrt`",
            parameters=["target_arch"],
        )
    raise UsageError(
        f"target_arch {arch}: TensorRT-RTX compiles for {_list(RTX_CAPABILITIES)}",
        hint="see https://developer.nvidia.com/cuda-gpus for the compute capability of your GPU",
        parameters=["target_arch"],
    )


def _check_precision(precision: str, capabilities: Sequence[str]) -> None:
    least, reason = _LEAST.get(precision, ("0.0", ""))
    short = [capability for capability in capabilities if not can_compute(precision, capability)]
    if short:
        other = (
            "fp16 or bf16" if precision == "fp8" and _number(min(short, key=_number)) >= (8, 0) else "fp16"
        )
        raise EagleError(
            f"precision {precision} cannot run on {_list(short)}: {reason}",
            hint=f"build in {other}, or compile for {arch_name(least)} and newer",
            parameters=["precision", "target_arch"],
        )


def _number(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def _list(capabilities: Sequence[str]) -> str:
    return ", ".join(map(arch_name, capabilities))
