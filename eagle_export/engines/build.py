"""Parse, check, configure, build: from an ONNX graph to an engine's bytes, in the compiler's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle_export.engines.layers import LayerLog
from eagle_export.engines.network import check_network, decompose_attention, load_graph, parse
from eagle_run.backends.profiles import tensor_range
from eagle_run.bundle.records import LayerSummary
from eagle_run.errors import EagleError

if TYPE_CHECKING:
    from eagle_export.engines.request import EngineRequest
    from eagle_run.backends.library import Library

Send = Callable[[dict[str, Any]], None]
_MAIN_PHASE = "Computing profile costs"
_FUSING = (16, 32, 64, 72, 80, 96, 128, 160, 192, 256)  # sizes of heads whose attention is known to compile
_DECOMPOSED = (
    "attention of an fp32 graph has no fused kernel: it is computed in several steps, which takes more "
    "memory and time; use fp16 or bf16 for speed"
)


@dataclass(frozen=True)
class Built:
    """An engine's bytes and what is known of it. kinds: layers of the parsed network by kind."""

    engine: Any  # the library's host memory, a buffer
    kinds: dict[str, int]
    summaries: tuple[LayerSummary | None, ...]
    warnings: list[str]


def build(library: Library, request: EngineRequest, send: Send) -> Built:
    """Compiles `request`; `send` takes {"progress": [share done, what is going on]} and {"log": line}.

    Raises EagleError for a graph that the parser cannot read or that lost something on the way (see
    `network.check_network`), and where the compiler gives up.
    """
    trt = library.module
    log = LayerLog()
    logger = _logger(trt, log, send)
    send({"progress": [0.0, "read the graph"]})
    graph = load_graph(request.onnx)
    builder = trt.Builder(logger)
    network, parser = parse(library, builder, logger, request.onnx)
    kinds = check_network(library, network, graph, request.onnx, request.spec)
    warnings = []
    if request.precision == "fp32" and kinds.get("ATTENTION_INPUT"):
        decompose_attention(library, network)
        warnings.append(_DECOMPOSED)
    monitor = _monitor(trt, PhaseProgress(send, len(request.profiles)))
    engine = _build(library, request, builder, network, monitor)
    if engine is None:
        raise _failure(library, request, logger.problems)
    del parser  # it owns the weights until here
    matmuls = {node.name for node in graph.node if node.op_type == "MatMul"}
    summaries = log.summaries(len(request.profiles), matmuls)
    warnings += _doubts(request, summaries, kinds.get("ATTENTION_INPUT", 0))
    return Built(engine, kinds, summaries, warnings)


def _doubts(
    request: EngineRequest, summaries: Sequence[LayerSummary | None], attentions: int
) -> Iterator[str]:
    """What the chosen kernels fall short of, one sentence each."""
    for profile, summary in zip(request.profiles, summaries, strict=True):
        if summary is None:
            continue
        mixed = {kind: n for kind, n in summary.gemms.items() if "x" in kind and "?" not in kind}
        if mixed:
            what = ", ".join(f"{count} {kind}" for kind, count in mixed.items())
            yield f"profile {profile.name}: products of operands of two types ({what}): only storage is saved"
        fused = sum(summary.attention.values())
        if fused < attentions and request.precision != "fp32":
            yield f"profile {profile.name}: {fused} of {attentions} attention layers have a fused kernel"


def _build(library: Library, request: EngineRequest, builder: Any, network: Any, monitor: Any) -> Any:
    """The engine's bytes, or None where the compiler gave up."""
    from polygraphy import config as polygraphy
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    polygraphy.USE_TENSORRT_RTX = library.is_rtx  # before its backends are imported: they choose then
    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    from polygraphy.backend.trt import EngineBytesFromNetwork

    config = configure(library, request, builder, network)
    config.progress_monitor = monitor
    cache = request.settings.timing_cache
    load = EngineBytesFromNetwork(
        (builder, network), config, save_timing_cache=None if cache is None else str(cache)
    )
    try:
        return load()
    except PolygraphyException:  # it says no more than that there is no engine; the library's log does
        return None


def configure(library: Library, request: EngineRequest, builder: Any, network: Any) -> Any:
    """The library's builder config: profiles, architectures, compatibility, workspace, timing cache."""
    trt, settings = library.module, request.settings
    options: dict[str, Any] = {
        "profiles": _profiles(request),
        "builder_optimization_level": settings.optimization_level,
        "profiling_verbosity": trt.ProfilingVerbosity.DETAILED,
    }
    if settings.workspace_mib is not None:
        options["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: settings.workspace_mib << 20}
    if library.is_rtx:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        pairs = [tuple(map(int, capability.split("."))) for capability in settings.capabilities]
        config = CreateConfigRTX(compute_capabilities=pairs, **options)(builder, network)
    else:
        from polygraphy.backend.trt import CreateConfig

        if settings.hardware_compatibility != "none":
            level = settings.hardware_compatibility.upper()
            options["hardware_compatibility_level"] = getattr(trt.HardwareCompatibilityLevel, level)
        cache = settings.timing_cache
        config = CreateConfig(
            version_compatible=settings.version_compatible,
            load_timing_cache=str(cache) if cache is not None and cache.exists() else None,
            **options,
        )(builder, network)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # The runtime captures whole rounds as CUDA graphs and lends every profile's context the same memory:
        # nothing may be allocated while an engine runs.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    return config


def _profiles(request: EngineRequest) -> list[Any]:
    from polygraphy.backend.trt import Profile

    made = []
    for profile in request.profiles:
        one = Profile()
        for tensor in request.spec.inputs:
            least, tuned, most = tensor_range(tensor, profile)
            one.add(tensor.name, min=least, opt=tuned, max=most)
        made.append(one)
    return made


def _logger(trt: Any, log: LayerLog, send: Send) -> Any:
    """A logger that keeps the layer list and passes problems on at once, so that they survive a crash."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.problems: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                line = " ".join(message.split())
                self.problems.append(line)
                send({"log": line})
            else:
                log.add(message)

    return Logger()


def _monitor(trt: Any, progress: PhaseProgress) -> Any:
    """The library's own interface to `PhaseProgress`."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            progress.start(phase, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            progress.step(phase, step)
            return True

        def phase_finish(self, phase: str) -> None:
            progress.finish(phase)

    return Monitor()


class PhaseProgress:
    """Turns the builder's nested phases into one share of 0 to 1 that never falls, told 4 times a second.

    Nearly all time goes into one phase, which has equally many steps for each profile; what comes before and
    after counts nothing.
    """

    def __init__(self, send: Send, profiles: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._profiles = profiles
        self._clock = clock
        self._open: dict[str, list[int]] = {}  # phase -> [steps done, steps], outermost first
        self._most = 0.0
        self._sent = float("-inf")

    def start(self, phase: str, steps: int) -> None:
        if phase == _MAIN_PHASE or self._open:
            self._open[phase] = [0, max(steps, 1)]
        self._tell(phase)

    def step(self, phase: str, step: int) -> None:
        if phase in self._open:
            self._open[phase][0] = step + 1
            self._tell(phase)

    def finish(self, phase: str) -> None:
        if phase in self._open:
            self._open[phase][0] = self._open[phase][1]
            self._tell(phase)
            del self._open[phase]

    def _tell(self, phase: str) -> None:
        share, width = 0.0, 1.0
        for done, steps in self._open.values():
            share += width * min(done, steps) / steps
            width /= steps
        self._most = max(self._most, min(share, 1.0))
        if self._clock() - self._sent >= 0.25:
            self._sent = self._clock()
            current = min(int(self._most * self._profiles) + 1, self._profiles)
            what = f"profile {current} of {self._profiles}" if self._open else phase.lower()
            self._send({"progress": [round(self._most, 4), what]})


def _failure(library: Library, request: EngineRequest, problems: list[str]) -> EagleError:
    """Why there is no engine, from the last errors of the library."""
    reason = "; ".join(problems[-3:]) or "it does not say why"
    hint, parameters = "read its message above; another precision or fewer profiles may do", ["profiles"]
    sizes = {tensor.shape[-1] for tensor in request.spec.inputs if tensor.name.startswith("past_")}
    unfused = sorted(size for size in sizes if size not in _FUSING)
    if unfused:  # the library's own message does not always mention attention
        hint = (
            f"most likely it has no fused attention for heads of {unfused[0]} values: "
            f"{', '.join(map(str, _FUSING))} are known to work; build for onnxruntime with this model"
        )
        parameters = ["backend"]
    return EagleError(
        f"{library.label} cannot compile the {request.graph} graph: {reason}",
        hint=hint,
        parameters=parameters,
    )
