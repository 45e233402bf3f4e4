"""The backends whose engines a bundle may hold: their modules, their GPUs, and what compiles for one."""

from __future__ import annotations

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")  # what TensorRT-RTX 1.7 lists


def compile_command(backend: str, capability: str) -> str:
    """What makes engines for GPUs of this compute capability ("8.9"), of `backend` if it knows them."""
    if backend == "tensorrt-rtx" and capability in RTX_CAPABILITIES:
        arch = f"sm{capability.replace('.', '')}"
        return f"`eagle-export compile BUNDLE --backend tensorrt-rtx --target-arch {arch}`"
    return "`eagle-export compile BUNDLE --backend tensorrt` on that machine"
