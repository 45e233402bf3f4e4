"""What a build or a compilation will take, said before it starts: disk, memory, and roughly time.

Sizes follow from the weights' headers and are close (tests hold them against real builds). Memory and seconds
are lines through what was measured on two CPU cores (docs/log.md; compile.json and export_scale.json in
benchmarks/results): within a third for memory, a guess for time. Tests hold them against these files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_export.inspection.describe import size
from eagle_export.pipeline.decoding_memory import DecodingMemory
from eagle_export.pipeline.sizes import GraphWeights
from eagle_run.errors import EagleError

# Lines through what was measured. Bytes of a graph's nodes and of an engine's kernels: once, by layer.
_GRAPH = (1_000, 11_000)
_KERNELS = {"16": (3_200_000, 182_000), "fp8": (2_500_000, 735_000)}  # for each profile
_FUSE_KERNELS = 20_000  # a graph without layers is one product
_OTHER_FILES = 8_000_000  # tokenizer, manifest, vocabulary map
# Bytes of memory. An export takes what Python and its libraries take, some for each layer that is traced, and
# the weight that it holds. Blocks that are read and written are small, and so are those of threads that hash.
_STREAMED = (520e6, 1e6, 1.0)  # once, by layer, by byte that is held
_LOADED = (550e6, 1.25)  # once, by byte of weights: as they are read, or converted
_COMPILE = (280e6, 12e6, 3.0)  # once, by layer, by byte of weights
# Seconds.
# Importing libraries and checking; tracing; hashing what is read; converting and writing what is not linked.
_EXPORT_SECONDS = (12.0, 0.2, 1.25, 3.5)  # once, by layer, by GB that is hashed, by GB that is written
_CALIBRATE_SECONDS = (0.0, 50.0)  # once, by GB of weights in fp32
_MEASURE_SECONDS = (10.0, 60.0)  # likewise
_COMPILE_SECONDS = (2.5, 0.25, 3.0)  # by graph, by layer and profile, by GB of weights

_MORE_MEMORY: dict[str, tuple[str, tuple[str, ...]]] = {  # hint and parameters, by the step that needs it
    "calibrate": ("calibrate on a machine with more memory, and give its fp8_scales.json here", ("scales",)),
    "export": (
        "use a machine with more memory, or a checkpoint in safetensors: it is not loaded as a whole",
        (),
    ),
    "measure": ("leave the measurement out", ("measure",)),
    "compile": (
        "build the bundle for onnxruntime here, and compile it with `eagle-export compile` on a machine with "
        "more memory",
        ("backend",),
    ),
}


@dataclass(frozen=True)
class GraphEstimate:
    """Bytes of one graph's ONNX files and of its engine (0: none is made)."""

    name: str
    onnx_bytes: int
    engine_bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory (swap counted) of this machine, or of what its container grants."""

    available: int
    total: int


@dataclass(frozen=True)
class StepEstimate:
    """A part of the work. Memory is the most resident at a time, of one process."""

    memory_bytes: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """What it will take. `steps` are those that are done, of calibrate, export, measure and compile.

    decoding: what the bundle takes later, at its limits; None where that is not known.
    """

    graphs: tuple[GraphEstimate, ...]
    disk_bytes: int
    steps: Mapping[str, StepEstimate]
    decoding: DecodingMemory | None = None
    max_batch: int = 1

    @property
    def memory_bytes(self) -> int:
        return max((step.memory_bytes for step in self.steps.values()), default=0)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps.values())

    def line(self) -> str:
        """The whole in one line."""
        return (
            f"about {size(self.disk_bytes)} of disk, {size(self.memory_bytes)} of memory and "
            f"{_time(self.seconds)} on two cores"
        )

    def check(self, memory: Memory, disk_free: int, folder: Path) -> tuple[str, ...]:
        """Warnings, one sentence each.

        Raises EagleError when the disk of `folder` is too small, or when more than twice all memory is
        needed: no error of the estimate could make that fit. What is merely larger than the available memory
        may still work, by swapping or because another program ends, so that is a warning.
        """
        if disk_free < self.disk_bytes:
            raise EagleError(
                f"{folder}: about {size(self.disk_bytes)} are needed, {size(disk_free)} are free",
                hint="free some disk space, or choose another folder",
                parameters=["out"],
            )
        needed = f"about {size(self.memory_bytes)} of memory are needed"
        if self.memory_bytes > 2 * memory.total:
            hint, parameters = _MORE_MEMORY[max(self.steps, key=lambda name: self.steps[name].memory_bytes)]
            raise EagleError(
                f"{needed}, there are {size(memory.total)} in all", hint=hint, parameters=parameters
            )
        if self.memory_bytes > memory.available:
            available = size(memory.available)
            return (
                f"warning: {needed}, {available} are available: this may be slow, or the system may end it",
            )
        return ()

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for scripts."""
        return {
            "graphs": {
                g.name: {"onnx_bytes": g.onnx_bytes, "engine_bytes": g.engine_bytes} for g in self.graphs
            },
            "steps": {
                name: {"memory_bytes": step.memory_bytes, "seconds": round(step.seconds)}
                for name, step in self.steps.items()
            },
            "disk_bytes": self.disk_bytes,
            "memory_bytes": self.memory_bytes,
            "seconds": round(self.seconds),
            "decoding": None if self.decoding is None else self.decoding.as_dict(self.max_batch),
        }

    def render(self) -> Any:
        """A rich table: a row for each graph and each step, and the whole."""
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("", "disk", "memory", "time on two cores"):
            table.add_column(column, justify="left" if not column else "right")
        for graph in self.graphs:
            if graph.onnx_bytes:
                table.add_row(f"{graph.name} graph", size(graph.onnx_bytes), "", "")
            if graph.engine_bytes:
                table.add_row(f"{graph.name} engine", size(graph.engine_bytes), "", "")
        for name, step in self.steps.items():
            table.add_row(name, "", size(step.memory_bytes), _time(step.seconds))
        whole = size(self.disk_bytes), size(self.memory_bytes), _time(self.seconds)
        table.add_row("about", *whole, style="bold")
        if self.decoding is not None:
            later = f"decoding later, at most {self.max_batch} side by side, beside the weights"
            table.add_row(later, "", size(self.decoding.of(self.max_batch)), "")
        return table


def estimate(
    graphs: Iterable[GraphWeights],
    precision: str,
    *,
    exports: bool = True,
    calibrates: bool = False,
    measures: bool = False,
    links: bool = False,
    profiles: Mapping[str, int] | None = None,
) -> Estimate:
    """What it takes to export these graphs, and to compile those in `profiles`.

    exports: whether the graphs are still to be made (False for `eagle-export compile`). calibrates: whether
    FP8 scales must be found first. measures: whether the graphs are compared with float32 afterwards.
    links: whether weights stay in the checkpoint's files where they can.
    profiles: optimization profiles of each graph's engine, by graph; None for no engines. That an engine
    is for several GPUs was not seen to cost time or space.
    """
    graphs = tuple(graphs)
    profiles = profiles or {}
    compiled = [graph for graph in graphs if graph.name in profiles]
    rows = tuple(
        GraphEstimate(
            graph.name,
            onnx_bytes=_graph_bytes(graph, links) if exports else 0,
            engine_bytes=graph.bytes + profiles[graph.name] * _kernels(graph, precision)
            if graph in compiled
            else 0,
        )
        for graph in graphs
    )
    steps = _export_steps(graphs, calibrates, measures, links) if exports else {}
    if compiled:
        steps["compile"] = StepEstimate(
            max(int(_line(_COMPILE, graph.layers, graph.bytes)) for graph in compiled),
            sum(
                _line(_COMPILE_SECONDS, graph.layers * profiles[graph.name], graph.bytes / 1e9)
                for graph in compiled
            ),
        )
    return Estimate(
        graphs=rows,
        disk_bytes=sum(row.onnx_bytes + row.engine_bytes for row in rows) + _OTHER_FILES,
        steps=steps,
    )


def _graph_bytes(graph: GraphWeights, links: bool) -> int:
    written = graph.bytes - (graph.linked_bytes if links else 0)
    return written + int(_line(_GRAPH, graph.layers))


def _export_steps(
    graphs: Sequence[GraphWeights], calibrates: bool, measures: bool, links: bool
) -> dict[str, StepEstimate]:
    """What making these graphs takes. Weights are read and written one at a time."""
    read, own, fp32 = (
        sum(getattr(graph, name) for graph in graphs) for name in ("read_bytes", "bytes", "fp32_bytes")
    )
    steps: dict[str, StepEstimate] = {}
    if calibrates:
        memory = _line(_LOADED, max(read, own, fp32))
        steps["calibrate"] = StepEstimate(int(memory), _line(_CALIBRATE_SECONDS, fp32 / 1e9))
    held = max(graph.unlinked_held_bytes if links else graph.held_bytes for graph in graphs)
    held += sum(graph.loaded_bytes for graph in graphs)
    layers = sum(graph.layers for graph in graphs)
    written = sum(_graph_bytes(graph, links) for graph in graphs)
    steps["export"] = StepEstimate(
        int(_line(_STREAMED, layers, held)), _line(_EXPORT_SECONDS, layers, read / 1e9, written / 1e9)
    )
    if measures:  # the float32 modules, and ONNX Runtime with weights that it widens
        memory = _LOADED[0] + 2 * fp32 + own + read
        steps["measure"] = StepEstimate(int(memory), _line(_MEASURE_SECONDS, fp32 / 1e9))
    return steps


def memory_here() -> Memory:
    """Of this machine, with swap; of the container, where one sets a limit (control groups, version 2)."""
    import psutil

    main, swap = psutil.virtual_memory(), psutil.swap_memory()
    machine = Memory(main.available + swap.free, main.total + swap.total)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # another system, or "max": no limit
        return machine
    return Memory(min(machine.available, limit), min(machine.total, limit))


def _kernels(graph: GraphWeights, precision: str) -> int:
    """Bytes that one profile adds to an engine, beside the weights."""
    if not graph.layers:
        return _FUSE_KERNELS
    return int(_line(_KERNELS["fp8" if precision == "fp8" else "16"], graph.layers))


def _line(line: tuple[float, ...], *amounts: float) -> float:
    """A start, and so much for each of the amounts."""
    return line[0] + sum(slope * amount for slope, amount in zip(line[1:], amounts, strict=True))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
