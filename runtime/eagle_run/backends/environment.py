"""What a measurement ran on: processor, cores, threads, GPU, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eagle_run.errors import UsageError
from eagle_run.version import __version__

_LIBRARIES = ("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "tokenizers")


def environment(threads: int = 0) -> dict[str, Any]:
    """`threads` as the engine was told (0: one per core). Names no host, user or path."""
    return {
        "cpu": cpu_model(),
        **gpu(),
        "cores": cores(),
        "threads": thread_count(threads),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "eagle_run": __version__,
        **{name.replace("-", "_"): found for name in _LIBRARIES if (found := _version(name))},
    }


def gpu() -> dict[str, str]:
    """The GPU that torch would use and its compute capability; empty where there is none."""
    from eagle_run.backends.gpu import find_gpu

    found = find_gpu()
    return {} if found is None else {"gpu": found.name, "compute_capability": found.capability}


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_count(threads: int) -> int:
    """Threads inside an operator: as asked, and one per core where 0 is.

    Raises UsageError for fewer than 0, and for more than there are cores: threads that wait for each other in
    turns slow every operator down, by hundreds of times where there are many.
    """
    if threads < 0:
        raise UsageError(
            f"threads is {threads}, expected 0 or more",
            hint="0 takes one per core",
            parameters=["threads"],
        )
    if threads > cores():
        raise UsageError(
            f"threads is {threads}, but this process may use {cores()} {'core' if cores() == 1 else 'cores'}",
            hint=f"ask for {cores()} or fewer; 0 takes one per core",
            parameters=["threads"],
        )
    return threads or cores()


def cpu_model() -> str:
    """The processor's name, e.g. "Intel(R) Xeon(R) Processor"."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
