"""Runs engines of TensorRT or TensorRT-RTX: one code, the imported library is an argument.

An engine runs in execution contexts. A context has one set of shapes at a time, and after a change the next
run does updates that a CUDA graph must not record. A round runs one engine at several shapes, so each set of
shapes has a context of its own, which after its first run never changes. (Any number of contexts may use one
profile, since TensorRT 10.) Prompts come in many shapes and are never captured: those share a context per
profile. All contexts of all engines work in the same scratch memory, since only one of them runs at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_run.backends.base import Graph, Run
from eagle_run.backends.checks import check_tensors
from eagle_run.backends.engine_checks import check_engine, check_fit, check_header
from eagle_run.backends.gpu import Gpu
from eagle_run.backends.kernel_cache import KernelCache
from eagle_run.backends.library import Library
from eagle_run.backends.profiles import narrowest
from eagle_run.bundle.manifest import Artifact
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.errors import EagleError

_ALIGNMENT = 256  # bytes, of scratch memory


def load_engines(library: Library, files: Sequence[tuple[Path, Artifact]], gpu: Gpu) -> dict[str, Graph]:
    """Loads engines that run one after the other (those of a bundle), by the name of their graph.

    Raises EagleError when one is for another GPU or another version of the library, is not what the manifest
    says, or does not fit into the GPU's memory.
    """
    loader = _Loader(library, gpu)
    loaded = [(artifact, loader.load(path, artifact)) for path, artifact in files]
    scratch = _scratch([native for _, native in loaded], gpu)
    graphs: dict[str, Graph] = {}
    for artifact, native in loaded:
        cache = KernelCache(library, native, artifact, gpu) if library.is_rtx else None
        how = cache.config if cache else library.module.ExecutionContextAllocationStrategy.USER_MANAGED
        graphs[artifact.graph] = TensorRTGraph(_Engine(loader, native, artifact, scratch, how, cache))
    return graphs


@dataclass(frozen=True)
class _Engine:
    """A loaded engine, and all that must live as long as it: the library holds bare addresses of them.

    `how` is what its contexts are made with: an allocation strategy, or (TensorRT-RTX) a runtime config.
    """

    loader: _Loader
    native: Any
    artifact: Artifact
    scratch: torch.Tensor
    how: Any
    cache: KernelCache | None


class TensorRTGraph:
    """A graph as an engine in GPU memory. Made by `load_engines`."""

    def __init__(self, engine: _Engine) -> None:
        assert engine.artifact.engine is not None
        self._engine = engine
        self._spec = engine.artifact.spec()
        self._profiles = engine.artifact.engine.profiles
        self._shared: dict[int, _Context] = {}
        self._capturable = True

    @property
    def spec(self) -> GraphSpec:
        return self._spec

    @property
    def capturable(self) -> bool:
        """True until the library says of a bound context that its work cannot be captured."""
        return self._capturable

    def bind(self, tensors: Mapping[str, torch.Tensor], *, shared: bool = False) -> Run:
        """A call that runs the engine on these tensors, in the narrowest profile that holds their sizes.

        With `shared` the execution context is that of all sets of shapes bound this way: it costs no memory,
        but changes shapes when another of them ran before, so that such a run must not be captured.
        Raises EagleError for tensors that do not fit the graph, for past and present of a layer at different
        addresses, and for sizes that no profile holds.
        """
        sizes = check_tensors(self._spec, tensors)
        _check_aliases(self._spec, tensors)
        place = narrowest(self._spec.name, self._profiles, sizes)
        if shared:
            if place not in self._shared:
                self._shared[place] = _Context(self._engine, self._spec, place)
            return self._shared[place].run_of_many(dict(tensors))
        context = _Context(self._engine, self._spec, place)
        context.take(dict(tensors))
        capturable = getattr(context.native, "is_stream_capturable", None)  # TensorRT-RTX only
        if capturable is not None and not capturable(self._engine.loader.gpu.stream()):
            self._capturable = False
        return context.run


class _Context:
    """One execution context of the library: shapes, addresses, and the tensors that these belong to."""

    def __init__(self, engine: _Engine, spec: GraphSpec, place: int) -> None:
        self._engine, self._spec = engine, spec
        self._stream = engine.loader.gpu.stream
        self._tensors: Mapping[str, torch.Tensor] = {}
        self.native = engine.native.create_execution_context(engine.how)
        if self.native is None:
            raise self._failure("make a context for")
        if not self.native.set_optimization_profile_async(place, self._stream()):
            raise self._failure("select the profile of")
        self.native.set_device_memory(engine.scratch.data_ptr(), engine.scratch.numel())

    def run(self) -> None:
        """Enqueues the engine on the stream, with the shapes and addresses that were taken last."""
        if not self.native.execute_async_v3(self._stream()):
            raise self._failure("run")

    def run_of_many(self, tensors: Mapping[str, torch.Tensor]) -> Run:
        """A run with `tensors`, which are taken again when the context ran with others before."""

        def run() -> None:
            if self._tensors is not tensors:
                self.take(tensors)
            self.run()

        return run

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the shapes and addresses of all tensors, and checks that nothing is missing."""
        native = self.native
        for spec in self._spec.inputs:
            if not native.set_input_shape(spec.name, tuple(tensors[spec.name].shape)):
                raise self._failure(f"take {spec.name} of {list(tensors[spec.name].shape)} into")
        for name, tensor in tensors.items():
            if not native.set_tensor_address(name, tensor.data_ptr()):
                raise self._failure(f"take the address of {name} into")
        try:
            missing = native.infer_shapes()
        except RuntimeError as error:  # its word for shapes that contradict each other
            raise self._failure("infer the shapes of") from error
        if missing:
            raise EagleError(f"the {self._spec.name} engine does not know the shape of {', '.join(missing)}")
        for spec in self._spec.outputs:
            shape = tuple(native.get_tensor_shape(spec.name))
            if shape != tuple(tensors[spec.name].shape):
                raise EagleError(
                    f"the {self._spec.name} engine writes {spec.name} of {list(shape)}; bound is a tensor of "
                    f"{list(tensors[spec.name].shape)}"
                )
        self._tensors = tensors

    def _failure(self, what: str) -> EagleError:
        """The library said no; its last message tells why."""
        loader = self._engine.loader
        return EagleError(
            f"{loader.library.label} cannot {what} the {self._spec.name} engine: "
            f"{loader.log.last or 'it does not say why'}",
            hint="the GPU may be out of memory (a smaller batch helps) or its driver too old; if this "
            "happens while rounds are captured, decoding without CUDA graphs avoids it",
            parameters=["batch", "cuda_graphs"],
        )


class _Loader:
    """A library on a GPU: its runtime and its log, which live as long as any engine of theirs."""

    def __init__(self, library: Library, gpu: Gpu) -> None:
        self.library = library
        self.gpu = gpu
        self.log = make_log(library.module)
        self.runtime = library.module.Runtime(self.log)

    def load(self, path: Path, artifact: Artifact) -> Any:
        """The engine in `path`, checked. The file is mapped, so its weights are in the host's memory once."""
        where = str(path)
        check_fit(self.library, artifact, where, self.gpu.capability, self.gpu.name)
        if artifact.engine is not None and artifact.engine.version_compatible:
            self.runtime.engine_host_code_allowed = True  # such an engine brings the runtime of its version
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = data[: getattr(self.runtime, "engine_header_size", 0)]
            check_header(self.library, self.runtime, header, where, self.log)
            self.log.last = ""
            engine = self.runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EagleError(
                f"{where}: {self.library.label} cannot load it: {self.log.last or 'it does not say why'}",
                hint="is enough GPU memory free (`nvidia-smi`)? Else compile the bundle again with "
                "`eagle-export compile BUNDLE`",
            )
        check_engine(engine, artifact, where)
        return engine


def make_log(trt: Any) -> Any:
    """A logger of the library `trt` that keeps the last error, as `last`, and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]  # the library is only known when it is there
        def __init__(self) -> None:
            super().__init__()
            self.last = ""
            self._errors = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

        def log(self, severity: Any, message: str) -> None:
            # Called under the library's lock. No container is made here, so that no garbage collection starts
            # here: one that frees another of the library's objects would wait for that lock forever.
            if severity in self._errors:
                self.last = message

    return Log()


def _scratch(engines: Sequence[Any], gpu: Gpu) -> torch.Tensor:
    """Memory for the largest need of any engine, u8 and aligned. It never moves: captured graphs use it."""
    size = max([1, *(engine.device_memory_size_v2 for engine in engines)])  # of an engine: over its profiles
    try:
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=gpu.device)
    except torch.OutOfMemoryError as error:
        raise EagleError(
            f"the engines need {size / 1e6:.0f} MB of scratch memory, which {gpu.name} has not left",
            hint="close what else uses the GPU, or compile for a smaller prefill chunk or tree",
        ) from error
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size]


def _check_aliases(spec: GraphSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    for tensor in spec.outputs:
        if not tensor.name.startswith("present_"):
            continue
        past = tensor.name.replace("present_", "past_")
        if tensors[tensor.name].data_ptr() != tensors[past].data_ptr():
            raise EagleError(
                f"graph {spec.name}: {past} and {tensor.name} must be one tensor, which is updated in place"
            )
