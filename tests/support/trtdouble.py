"""A stand-in for the half of `tensorrt` (or `tensorrt_rtx`) that runs engines: on a CPU, with real numbers.

Its engine file names a bundle's ONNX graph. `execute_async_v3` runs that graph in ONNX Runtime on the very
addresses and shapes that were set, so tokens that come out are those of the model or the backend is wrong.
What TensorRT answers with False and a line in its log is answered so here. What it answers with garbage or a
crash raises Misuse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import torch

from eagle_export.engines.profiles import choose_profiles
from eagle_run.backends.base import Graph
from eagle_run.backends.gpu import Gpu
from eagle_run.backends.library import Library
from eagle_run.backends.profiles import tensor_range
from eagle_run.bundle.engine_backends import MODULES
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.bundle.manifest import Artifact
from eagle_run.dtypes import DTYPES
from support.trtcontext import IExecutionContext, IRuntimeCache, IRuntimeConfig, RtxExecutionContext
from support.trtworld import (
    STREAM,
    VERSIONS,
    CudaGraphStrategy,
    DataType,
    DynamicShapesKernelSpecializationStrategy,
    EngineInvalidityDiagnostics,
    EngineValidity,
    ExecutionContextAllocationStrategy,
    ILogger,
    Misuse,
    TensorIOMode,
    TensorLocation,
    World,
)

__all__ = [
    "STREAM",
    "ICudaEngine",
    "IRuntimeCache",
    "Misuse",
    "Runtime",
    "World",
    "add_engines",
    "double_gpu",
    "make_library",
    "write_engine",
]
HEADER = 64


def make_library(world: World, backend: str = "tensorrt-rtx") -> Library:
    """The stand-in for the library of `backend`, in `world`."""
    module = ModuleType(MODULES[backend])
    rtx = backend == "tensorrt-rtx"
    world.version = VERSIONS[backend]
    enums = (DataType, TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy)
    rtx_enums = (
        DynamicShapesKernelSpecializationStrategy,
        CudaGraphStrategy,
        EngineValidity,
        EngineInvalidityDiagnostics,
    )
    for one in (*enums, *(rtx_enums if rtx else ()), ILogger):
        setattr(module, one.__name__, one)
    base = RtxRuntime if rtx else Runtime
    module.Runtime = type("Runtime", (base,), {"_world": world, "_rtx": rtx})  # type: ignore[attr-defined]
    return Library(module, backend, VERSIONS[backend])


def write_engine(path: Path, artifact: Artifact, onnx: Path, *, scratch: int, **changes: Any) -> None:
    """An engine file for the graph at `onnx` that the manifest's `artifact` tells of; `changes` break it."""
    assert artifact.engine is not None
    spec = artifact.spec()
    data: dict[str, Any] = {
        "onnx": str(onnx),
        "tensors": [
            [tensor.name, mode, DTYPES[tensor.dtype].tensorrt, list(tensor.shape)]
            for mode, tensors in (("INPUT", spec.inputs), ("OUTPUT", spec.outputs))
            for tensor in tensors
        ],
        "profiles": [
            {tensor.name: tensor_range(tensor, profile) for tensor in spec.inputs}
            for profile in artifact.engine.profiles
        ],
        "scratch": [scratch + place for place in range(len(artifact.engine.profiles))],
        "aliases": {t.name: t.name.replace("present", "past") for t in spec.outputs if "present_" in t.name},
        **changes,
    }
    version = artifact.library_version.rpartition(" ")[2]
    header = f"DOUBLE {version} {','.join(artifact.compute_capabilities)}".ljust(HEADER)
    path.write_bytes(header.encode() + json.dumps(data).encode())


def add_engines(
    root: Path,
    backend: str = "tensorrt-rtx",
    capabilities: Sequence[str] = ("8.9",),
    *,
    breaks: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Bundle:
    """Gives the bundle at `root` stand-in engines of all its graphs, with the profiles that compile chooses.

    `changes` are to the manifest's artifacts, or to their EngineInfo; `breaks` are to the engine files.
    """
    manifest = json.loads((root / "manifest.json").read_text())
    bundle = load_bundle(root, verify_hashes=False)
    (root / "engines").mkdir(exist_ok=True)
    for graph in [found for found in manifest["artifacts"] if found["backend"] == "onnx"]:
        profiles = choose_profiles(graph["graph"], bundle.manifest.limits, bundle.manifest.tree)
        engine = {
            "profiles": [profile.model_dump(mode="json") for profile in profiles],
            "attention_layers": 1,
            "cache_updates": 2,
            "seconds": 1.0,
            "peak_memory_bytes": 1,
        }
        file = f"engines/{graph['graph']}.{backend}-{'-'.join(capabilities)}.engine"
        entry: dict[str, Any] = {
            **graph,
            "backend": backend,
            "file": file,
            "files": [{"path": file, "bytes": 0, "sha256": "0" * 64}],
            "opset": None,
            "library_version": f"{backend} {VERSIONS[backend]}",
            "compute_capabilities": list(capabilities),
            "engine": engine,
        }
        for key, value in changes.items():
            (entry if key in entry else engine)[key] = value
        artifact = Artifact.model_validate_json(json.dumps(entry))
        write_engine(root / file, artifact, root / graph["file"], scratch=1000, **(breaks or {}))
        data = (root / file).read_bytes()
        entry["files"] = [{"path": file, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}]
        manifest["artifacts"].append(entry)
    (root / "manifest.json").write_text(json.dumps(manifest))
    return load_bundle(root)


def double_gpu(capability: str = "8.9") -> Gpu:
    """A GPU whose memory is the host's."""
    return Gpu(torch.device("cpu"), capability, "Stand-in RTX", lambda: STREAM)


class Runtime:
    """`tensorrt.Runtime`."""

    _world: World
    _rtx: bool
    engine_host_code_allowed = False

    def __init__(self, logger: ILogger) -> None:
        if not isinstance(logger, ILogger):
            raise Misuse("a runtime needs a logger")
        self.logger = logger

    def deserialize_cuda_engine(self, serialized: Any) -> ICudaEngine | None:
        data = bytes(serialized)
        if not data.startswith(b"DOUBLE "):
            self.logger.log(ILogger.INFO, "Loaded engine size: 0 MiB")
            self.logger.log(ILogger.ERROR, "deserialization failed: magic tag does not match")
            return None
        return ICudaEngine(self, json.loads(data[HEADER:]))


class RtxRuntime(Runtime):
    """`tensorrt_rtx.Runtime`, which can also judge an engine by its first bytes."""

    engine_header_size = HEADER

    def get_engine_validity(self, buffer: bytes) -> tuple[EngineValidity, int]:
        if len(buffer) != HEADER or not buffer.startswith(b"DOUBLE "):
            return EngineValidity.INVALID, 32
        _, version, capabilities = buffer.decode().split()
        wrong = (version != self._world.version) + 2 * (self._world.capability not in capabilities.split(","))
        return (EngineValidity.INVALID if wrong else EngineValidity.VALID), wrong


class ICudaEngine:
    """`tensorrt.ICudaEngine`: the graph, by what its file says of it."""

    def __init__(self, runtime: Runtime, data: Mapping[str, Any]) -> None:
        self._data = data
        self._runtime = runtime
        self._tensors = {name: (mode, dtype, shape) for name, mode, dtype, shape in data["tensors"]}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(data["onnx"], options, ["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._data["profiles"])

    @property
    def device_memory_size_v2(self) -> int:
        return max(self._data["scratch"])

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self._tensors[name][0]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensors[name][1]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self._tensors[name][2])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation[self._data.get("locations", {}).get(name, "DEVICE")]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._data["aliases"].get(name)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._data["profiles"][profile_index][name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig(self._runtime._world)

    def create_execution_context(self, how: Any) -> IExecutionContext:
        strategy, config = how, None
        if isinstance(how, IRuntimeConfig):
            strategy, config = how._strategy, how
        if strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Misuse(f"a context that allocates memory: {strategy}")
        if self._runtime._rtx and (config is None or config._cache is None):
            raise Misuse("no runtime cache: every start compiles all kernels again")
        made = RtxExecutionContext if self._runtime._rtx else IExecutionContext
        context = made(self, self._runtime, config)
        self._runtime._world.contexts.append(context)
        return context


def tensors(graph: Graph, **sizes: int) -> dict[str, torch.Tensor]:
    sizes = {"B": 1, "T": 2, "R": 2, "KV": 128, **sizes}
    made = {
        spec.name: torch.zeros([sizes.get(str(n), n) for n in spec.shape], dtype=DTYPES[spec.dtype].torch)  # type: ignore[misc]
        for spec in (*graph.spec.inputs, *graph.spec.outputs)
    }
    made["tree_mask"][..., 0] = True
    for name in made:
        if name.startswith("present_"):
            made[name] = made[name.replace("present", "past")]
    return made
