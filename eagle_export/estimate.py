"""What a build or a compilation will take, said before it starts: disk, memory, and roughly time.

Sizes follow from the weights' headers and are close (tests hold them against real builds). Memory and seconds
are lines through what was measured on two CPU cores (docs/log.md, benchmarks/results/compile.json): right
within a third for memory, a guess for time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_export.describe import size
from eagle_export.weigh import GraphWeights, weigh_bundle, weigh_checkpoints
from eagle_run.errors import EagleError

__all__ = [
    "Estimate",
    "GraphEstimate",
    "GraphWeights",
    "Memory",
    "estimate",
    "memory_here",
    "weigh_bundle",
    "weigh_checkpoints",
]

# Lines through what was measured. Bytes of a graph's nodes and of an engine's kernels: once, by layer.
_GRAPH = (1_000, 11_000)
_KERNELS = {"16": (3_200_000, 182_000), "fp8": (2_500_000, 735_000)}  # for each profile
_FUSE_KERNELS = 20_000  # a graph without layers is one product
_OTHER_FILES = 8_000_000  # tokenizer, manifest, vocabulary map
# Bytes of memory.
_LOADED = (550e6, 1.25)  # once: Python's libraries; by byte of weights: as they are read, or converted
_COMPILE = (280e6, 12e6, 3.0)  # once, by layer, by byte of weights
# Seconds.
_EXPORT_SECONDS = (6.0, 0.2, 5.0)  # once, by layer, by GB of weights
_CALIBRATE_SECONDS = (0.0, 50.0)  # once, by GB of weights in fp32
_MEASURE_SECONDS = (10.0, 60.0)  # likewise
_COMPILE_SECONDS = (2.5, 0.25, 3.0)  # by graph, by layer and profile, by GB of weights


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
class Estimate:
    """What it will take. Memory is the most resident at a time, of one process; 0 for what is not done."""

    graphs: tuple[GraphEstimate, ...]
    disk_bytes: int
    export_memory_bytes: int
    compile_memory_bytes: int
    export_seconds: float
    compile_seconds: float

    @property
    def memory_bytes(self) -> int:
        return max(self.export_memory_bytes, self.compile_memory_bytes)

    def check(self, memory: Memory, disk_free: int, place: Path) -> tuple[str, ...]:
        """Warnings, one sentence each.

        Raises EagleError when the disk that holds `place` is too small, or when more than twice all memory is
        needed: no error of the estimate could make that fit. What is merely larger than the available memory
        may still work, by swapping or because another program ends, so that is a warning.
        """
        if disk_free < self.disk_bytes:
            raise EagleError(
                f"{place}: about {size(self.disk_bytes)} are needed, {size(disk_free)} are free",
                hint="free some disk space, or choose another place with --out",
            )
        needed = f"about {size(self.memory_bytes)} of memory are needed"
        if self.memory_bytes > 2 * memory.total:
            raise EagleError(
                f"{needed}, there are {size(memory.total)} in all",
                hint="use a machine with more memory; a bundle can be built on one, with --backend "
                "onnxruntime, and compiled on another with `eagle-export compile`",
            )
        if self.memory_bytes > memory.available:
            available = size(memory.available)
            return (f"{needed}, {available} are available: this may be slow, or the system may end it",)
        return ()

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "graphs": {
                g.name: {"onnx_bytes": g.onnx_bytes, "engine_bytes": g.engine_bytes} for g in self.graphs
            },
            "disk_bytes": self.disk_bytes,
            "export_memory_bytes": self.export_memory_bytes,
            "compile_memory_bytes": self.compile_memory_bytes,
            "export_seconds": round(self.export_seconds),
            "compile_seconds": round(self.compile_seconds),
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
        if self.export_memory_bytes:
            table.add_row("export", "", size(self.export_memory_bytes), _time(self.export_seconds))
        if self.compile_memory_bytes:
            table.add_row("compile", "", size(self.compile_memory_bytes), _time(self.compile_seconds))
        total = _time(self.export_seconds + self.compile_seconds)
        table.add_row("about", size(self.disk_bytes), size(self.memory_bytes), total, style="bold")
        return table


def estimate(
    graphs: Iterable[GraphWeights],
    precision: str,
    *,
    exports: bool = True,
    calibrates: bool = False,
    measures: bool = False,
    profiles: Mapping[str, int] | None = None,
) -> Estimate:
    """What it takes to export these graphs, and to compile those in `profiles`.

    exports: whether the graphs are still to be made (False for `eagle-export compile`). calibrates: whether
    FP8 scales must be found first. measures: whether the graphs are compared with float32 afterwards.
    profiles: optimization profiles of each graph's engine, by graph; None for no engines. That an engine
    is for several GPUs was not seen to cost time or space.
    """
    graphs = tuple(graphs)
    profiles = profiles or {}
    compiled = [graph for graph in graphs if graph.name in profiles]
    rows = tuple(
        GraphEstimate(
            graph.name,
            onnx_bytes=graph.bytes + int(_line(_GRAPH, graph.layers)) if exports else 0,
            engine_bytes=graph.bytes + profiles[graph.name] * _kernels(graph, precision)
            if graph in compiled
            else 0,
        )
        for graph in graphs
    )
    memory, seconds = _export(graphs, calibrates, measures) if exports else (0, 0.0)
    return Estimate(
        graphs=rows,
        disk_bytes=sum(row.onnx_bytes + row.engine_bytes for row in rows) + _OTHER_FILES,
        export_memory_bytes=memory,
        compile_memory_bytes=max(
            (int(_line(_COMPILE, graph.layers, graph.bytes)) for graph in compiled), default=0
        ),
        export_seconds=seconds,
        compile_seconds=sum(
            _line(_COMPILE_SECONDS, graph.layers * profiles[graph.name], graph.bytes / 1e9)
            for graph in compiled
        ),
    )


def _export(graphs: Sequence[GraphWeights], calibrates: bool, measures: bool) -> tuple[int, float]:
    """(bytes of memory, seconds) of making these graphs."""
    read, own, fp32 = (
        sum(getattr(graph, name) for graph in graphs) for name in ("read_bytes", "bytes", "fp32_bytes")
    )
    layers = sum(graph.layers for graph in graphs)
    seconds = _line(_EXPORT_SECONDS, layers, own / 1e9)
    held = max(read, own)  # bytes of weights at a time, in any type
    if calibrates:
        seconds += _line(_CALIBRATE_SECONDS, fp32 / 1e9)
        held = max(held, fp32)
    memory = _line(_LOADED, held)
    if measures:  # the float32 modules, and ONNX Runtime with weights that it widens
        seconds += _line(_MEASURE_SECONDS, fp32 / 1e9)
        memory = max(memory, _LOADED[0] + 2 * fp32 + own + read)
    return int(memory), seconds


def memory_here() -> Memory:
    """Of this machine, with swap; of the container, where one sets a limit (control groups, version 2)."""
    import psutil

    main, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = Memory(main.available + swap.free, main.total + swap.total)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # another system, or "max": no limit
        return found
    return Memory(min(found.available, limit), min(found.total, limit))


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
