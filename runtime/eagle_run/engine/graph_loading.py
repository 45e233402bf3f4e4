"""Which backend runs a bundle here, from which of its files, and loading them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_run.backends.base import Graph
from eagle_run.backends.environment import thread_count
from eagle_run.backends.gpu import Gpu, find_gpu, need_gpu
from eagle_run.backends.library import find_library
from eagle_run.backends.stream import on_stream
from eagle_run.bundle.engine_backends import MODULES, compile_command
from eagle_run.bundle.loading import Bundle
from eagle_run.bundle.manifest import Artifact, BackendName, GraphName
from eagle_run.errors import EagleError, UsageError

BACKENDS = ("auto", "onnxruntime", *MODULES)
DEVICES = ("auto", "cpu", "cuda")
Log = Callable[[str], None]


@dataclass(frozen=True)
class LoadedGraphs:
    """The graphs of a bundle, loaded, and what was chosen to run them.

    `backend` is "onnxruntime", "tensorrt" or "tensorrt-rtx". `device` is "cpu" or that of the GPU, "cuda:0".
    `precision` is that of the target graph which runs: an engine may have another than the ONNX graph.
    """

    graphs: dict[str, Graph]
    backend: str
    device: str
    precision: str


def load_graphs(
    bundle: Bundle,
    *,
    backend: str = "auto",
    device: str = "auto",
    threads: int = 0,
    with_draft: bool = True,
    log: Log | None = None,
) -> LoadedGraphs:
    """Loads the graphs of a bundle.

    backend: "auto" takes the TensorRT engines of the bundle, if some are for the GPU of this machine and
    their library is installed, and else its ONNX graphs in ONNX Runtime. device: "auto": the GPU for engines
    and the CPU for ONNX graphs; "cuda" wants the GPU, whatever runs there; "cpu" never uses it. `log` is told
    why a GPU that is there is not used. Without `with_draft` only the target is loaded.

    Raises UsageError for options that contradict each other and more threads than cores, and
    EagleError where the GPU, a library or a fitting file is missing.
    """
    _check(backend, device)
    thread_count(threads)
    log = log or (lambda _: None)
    names = graph_names(bundle, with_draft)
    if backend in MODULES:
        return _load_engines(bundle, names, backend, need_gpu(backend))  # type: ignore[arg-type]
    gpu = None if device == "cpu" else find_gpu()
    if backend == "auto" and gpu is not None:
        found = _usable_engines(bundle, names, gpu, log, device)
        if found is not None:
            return _load_engines(bundle, names, found, gpu)
    if device == "cuda":
        return _load_onnx(bundle, names, need_gpu("the device cuda"), threads)
    return _load_onnx(bundle, names, None, threads)


def graph_names(bundle: Bundle, with_draft: bool) -> list[GraphName]:
    """The graphs that decoding takes."""
    names: list[GraphName] = ["target"]
    if with_draft and bundle.manifest.head is not None:
        names.append("draft")
        if bundle.artifacts("fuse"):
            names.append("fuse")
    return names


def _check(backend: str, device: str) -> None:
    if backend not in BACKENDS:
        raise UsageError(
            f"unknown backend {backend!r}",
            hint=f"choose one of {', '.join(BACKENDS)}",
            parameters=["backend"],
        )
    if device not in DEVICES:
        raise UsageError(
            f"unknown device {device!r}",
            hint=f"choose one of {', '.join(DEVICES)}; CUDA_VISIBLE_DEVICES selects among several GPUs",
            parameters=["device"],
        )
    if backend in MODULES and device == "cpu":
        raise UsageError(
            f"{backend} runs on a GPU, not on the device cpu",
            hint="leave out the device, or use the backend onnxruntime",
            parameters=["device", "backend"],
        )


def _usable_engines(
    bundle: Bundle, names: Sequence[GraphName], gpu: Gpu, log: Log, device: str
) -> BackendName | None:
    """The backend whose engines run here. Says why there is none, if the bundle has engines at all."""
    instead = (
        "ONNX Runtime on the GPU"
        if device == "cuda"
        else "the CPU (the device cuda would be ONNX Runtime on it)"
    )
    engines = [artifact for artifact in bundle.artifacts("target") if artifact.backend in MODULES]
    why = ""
    for backend in MODULES:
        if not all(_has(bundle, name, backend, gpu.capability) for name in names):
            continue
        try:
            find_library(backend)
        except EagleError as error:
            why = f"its engines for this GPU cannot be used: {error.message}"
            continue
        return backend  # type: ignore[return-value]
    if engines and not why:
        others = sorted({capability for engine in engines for capability in engine.compute_capabilities})
        why = (
            f"its engines are for compute capability {', '.join(others)}, and {gpu.name} has {gpu.capability}"
            f" ({compile_command(engines[0].backend, gpu.capability)} makes some for it)"
        )
    if why:
        log(f"note: {bundle.path.name} runs on {instead}: {why}")
    elif device == "auto":
        log(
            f"note: {gpu.name} is not used, since {bundle.path.name} has no engines: "
            f"{compile_command('tensorrt', gpu.capability)} makes them; the device cuda runs the ONNX graphs"
        )
    return None


def _has(bundle: Bundle, name: GraphName, backend: str, capability: str) -> bool:
    return any(a.backend == backend and a.runs_on(capability) for a in bundle.artifacts(name))


def _load_engines(bundle: Bundle, names: Sequence[GraphName], backend: BackendName, gpu: Gpu) -> LoadedGraphs:
    from eagle_run.backends.tensorrt import load_engines

    artifacts = [bundle.artifact(name, backend, gpu.capability) for name in names]
    library = find_library(backend)
    with on_stream(gpu.device):
        graphs = load_engines(library, [(bundle.file(artifact), artifact) for artifact in artifacts], gpu)
    return LoadedGraphs(graphs, backend, str(gpu.device), artifacts[0].precision)


def _load_onnx(bundle: Bundle, names: Sequence[GraphName], gpu: Gpu | None, threads: int) -> LoadedGraphs:
    from eagle_run.backends.onnxruntime import OnnxRuntimeGraph

    device = "cpu" if gpu is None else str(gpu.device)
    artifacts = [bundle.artifact(name) for name in names]
    graphs: dict[str, Graph] = {}
    for artifact in artifacts:
        if gpu is None and _has_bf16(artifact):
            raise EagleError(
                f"{bundle.path} is in bf16, which ONNX Runtime computes on GPUs only",
                hint="build it in fp32 or fp16 for a CPU",
            )
        graph = OnnxRuntimeGraph(bundle.file(artifact), artifact.graph, device=device, threads=threads)
        if graph.spec != artifact.spec():
            raise EagleError(
                f"{bundle.file(artifact)}: the graph's inputs and outputs are not those in the manifest",
                hint="build the bundle again with `eagle-export build ... --force`",
            )
        graphs[artifact.graph] = graph
    return LoadedGraphs(graphs, "onnxruntime", device, artifacts[0].precision)


def _has_bf16(artifact: Artifact) -> bool:
    return any(tensor.dtype == "bfloat16" for tensor in (*artifact.inputs, *artifact.outputs))
