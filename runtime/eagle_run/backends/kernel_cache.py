"""How TensorRT-RTX runs an engine, and where the kernels go that it compiles for a GPU.

An engine of TensorRT-RTX is finished on the GPU that it runs on: for each new set of shapes it compiles
kernels, which takes seconds the first time. They are kept in the user's cache folder.
"""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

from eagle_run.backends.gpu import Gpu
from eagle_run.backends.library import Library
from eagle_run.bundle.hashing import cache_dir, write_cache
from eagle_run.bundle.manifest import Artifact


class KernelCache:
    """What one engine is run with: `config`, for its contexts, which allocate no memory themselves.

    New kernels are written when nothing uses the engine any more, at the latest when the process ends.
    """

    def __init__(self, library: Library, engine: Any, artifact: Artifact, gpu: Gpu) -> None:
        trt = library.module
        self.config = config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # Kernels for the shapes at hand before they run: with LAZY a capture would record the general ones
        # for good, and a prompt would give other last bits the second time than the first.
        eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = eager
        # The library must not capture for itself: whole rounds are captured.
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        cache = config.create_runtime_cache()
        sha256 = next(entry.sha256 for entry in artifact.files if entry.path == artifact.file)
        file = cache_file(sha256, gpu, library)
        before = _read(file)
        # It refuses what another driver, GPU or version made; then it starts empty.
        known = before if before and cache.deserialize(before) else b""
        config.set_runtime_cache(cache)
        # Cache and engine are held by the finalizer, and so outlive the contexts.
        self._save = weakref.finalize(self, _write, cache, known, file, engine)


def cache_file(sha256: str, gpu: Gpu, library: Library) -> Path:
    """Where the kernels of an engine are, on this GPU, for this version of the library."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")[:64]
    return cache_dir("eagle-run") / "kernels" / f"{sha256[:16]}.{name}.{library.version}.bin"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _write(cache: Any, known: bytes, file: Path, _engine: Any) -> None:
    made = bytes(cache.serialize())
    if made and made != known:
        write_cache(file, made)
