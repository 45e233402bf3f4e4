"""What this machine can do: libraries, GPU, room, demo weights, and which backends follow from them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_export.checkpoints import weights
from eagle_export.engines.architectures import arch_name, can_compute, check_architectures
from eagle_export.inspection.describe import size
from eagle_export.output_folder import free_space
from eagle_export.reference import recipe
from eagle_run.backends.library import find_library
from eagle_run.bundle.engine_backends import MODULES
from eagle_run.bundle.hashing import cache_dir
from eagle_run.errors import EagleError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from rich.console import RenderableType

Status = Literal["ok", "warn", "missing"]
Group = Literal["library", "machine", "backend", "compile", "demo"]

_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript")
_DEMO = "smollm2-135m"
# Both packages write into one folder: installing the second beside the first leaves a mix of the two.
_GPU_HINT = "pip uninstall onnxruntime, then pip install --force-reinstall onnxruntime-gpu"
_ROOM = 5 * 10**9  # bytes on disk, and of memory, that the demo is comfortable with


@dataclass(frozen=True)
class Check:
    """One finding. `hint` says how to get what is missing; empty when nothing is."""

    group: Group
    name: str
    status: Status
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as the driver reports it."""

    name: str
    driver: str
    memory: str
    compute_capability: str


def diagnose() -> list[Check]:
    """Every check, in the order they are shown. Missing optional parts are findings, not errors."""
    gpus = find_gpus()
    return [
        _python(),
        *(_library(name) for name in _LIBRARIES),
        _compiler("tensorrt", "tensorrt", "tensorrt"),
        _compiler("tensorrt-rtx", "tensorrt_rtx", "rtx"),
        _gpu(gpus),
        _memory(),
        _disk("disk here", Path.cwd()),
        _disk("disk for caches", cache_dir("eagle-export")),
        _demo_weights(),
        *_backends(gpus),
        *(_compile(name) for name in MODULES),
    ]


def to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """As plain data, for scripts."""
    return [asdict(check) for check in checks]


def render(checks: Sequence[Check]) -> RenderableType:
    """A table with one line per check, hints below their findings."""
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "what", "status", "found"):
        table.add_column(column, overflow="fold")
    shown = None
    for check in checks:
        detail = Text(check.detail)
        if check.hint:
            detail.append(f"\n{check.hint}", style="dim")
        group = check.group if check.group != shown else ""
        table.add_row(group, check.name, Text(check.status, style=style[check.status]), detail)
        shown = check.group
    return table


def find_gpus() -> list[Gpu]:
    """NVIDIA GPUs, asked from nvidia-smi; none where it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    try:
        answer = subprocess.run(
            [tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return [Gpu(*row) for row in rows if len(row) == 4]


def _python() -> Check:
    version = (
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    )
    return Check("library", "python", "ok", version)


def _library(name: str) -> Check:
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "onnxruntime" and importlib.util.find_spec(name):  # onnxruntime-gpu has the same module
            return Check("library", name, "ok", f"{importlib.import_module(name).__version__} (GPU package)")
        return Check("library", name, "missing", "not installed", f"pip install {name}")
    required = _wanted(name)
    if required.contains(installed, prereleases=True):
        return Check("library", name, "ok", installed)
    return Check(
        "library", name, "warn", f"{installed}, but {required} is wanted", f"pip install '{name}{required}'"
    )


def _wanted(name: str) -> SpecifierSet:
    """The versions of a library that this distribution asks for."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires("eagle-export") or []:
        requirement = Requirement(line)
        if requirement.name == name and requirement.marker is None:
            return requirement.specifier
    raise AssertionError(f"{name} is not a dependency of eagle-export")


def _compiler(name: str, module: str, extra: str) -> Check:
    """TensorRT or TensorRT-RTX: optional, so absence is only a warning."""
    hint = f"pip install 'eagle-export[{extra}]' (Linux or Windows, for NVIDIA GPUs)"
    if importlib.util.find_spec(module) is None:
        return Check("library", name, "missing", "not installed (optional)", hint)
    try:
        version = str(importlib.import_module(module).__version__)
    except Exception as error:  # a broken installation fails in many ways: missing libraries, wrong CUDA
        return Check("library", name, "warn", f"installed but cannot be imported: {error}", hint)
    return Check("library", name, "ok", version)


def _gpu(gpus: Sequence[Gpu]) -> Check:
    import torch

    if not gpus:
        hint = "optional; on a machine with an NVIDIA GPU install its driver"
        return Check("machine", "GPU", "missing", "no NVIDIA GPU, or no driver (nvidia-smi finds none)", hint)
    shown = "; ".join(
        f"{g.name}, {g.memory}, compute capability {g.compute_capability}, driver {g.driver}" for g in gpus
    )
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        hint = "install a torch build for CUDA that this driver supports"
        return Check("machine", "GPU", "warn", f"{shown}; but torch ({built}) cannot use it", hint)
    return Check("machine", "GPU", "ok", f"{shown}; torch with CUDA {torch.version.cuda}")


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{size(memory.total)}, {size(memory.available)} free"
    if memory.available < _ROOM:
        return Check(
            "machine", "memory", "warn", detail, f"the demo wants {size(_ROOM)}; close other programs"
        )
    return Check("machine", "memory", "ok", detail)


def _disk(name: str, folder: Path) -> Check:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = free_space(folder)
    detail = f"{size(free)} free at {folder}"
    if not os.access(existing, os.W_OK):
        return Check("machine", name, "warn", f"{existing} is not writable", "make it writable for this user")
    if free < _ROOM:
        return Check("machine", name, "warn", detail, f"the demo wants {size(_ROOM)}; free some space")
    return Check("machine", name, "ok", detail)


def _demo_weights() -> Check:
    source = recipe.load_recipe(_DEMO).target
    try:
        file = weights.find_gguf(str(source.package), str(source.version), str(source.file))
    except EagleError as error:
        return Check("demo", "demo weights", "missing", error.message, error.hint)
    return Check("demo", "demo weights", "ok", str(file))


def _backends(gpus: Sequence[Gpu]) -> list[Check]:
    """What each backend needs, first need that is not met first."""
    on_gpu: list[Need] = [_some_gpu(gpus), _torch_cuda]
    return [
        _backend("onnxruntime (CPU)", [_provider("CPUExecutionProvider")]),
        _backend("onnxruntime (CUDA)", [_provider("CUDAExecutionProvider"), *on_gpu]),
        _backend("tensorrt", [_module("tensorrt", "tensorrt"), *on_gpu]),
        _backend("tensorrt-rtx", [_module("tensorrt_rtx", "rtx"), *on_gpu]),
    ]


def _compile(backend: str) -> Check:
    """Which GPUs this machine can compile engines for, and with which precisions."""
    name = f"engines of {backend}"
    try:
        capabilities = find_library(backend).capabilities or check_architectures(backend, "fp16", ())
    except EagleError as error:
        return Check("compile", name, "missing", error.message, error.hint)
    able = "; ".join(
        f"{precision} for {', '.join(map(arch_name, fitting))}"
        for precision, fitting in _by_precision(capabilities)
    )
    where = "on this GPU only" if backend == "tensorrt" else "without a GPU"
    return Check("compile", name, "ok", f"{able} ({where})")


def _by_precision(capabilities: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for precision in ("fp16", "bf16", "fp8"):
        fitting = [capability for capability in capabilities if can_compute(precision, capability)]
        if fitting:
            yield precision, fitting


Need = Callable[[], tuple[str, str] | None]  # what is lacking and how to get it, or None


def _backend(name: str, needs: Sequence[Need]) -> Check:
    for need in needs:
        if lack := need():
            return Check("backend", name, "missing", *lack)
    return Check("backend", name, "ok", "works here")


def _provider(provider: str) -> Need:
    def lack() -> tuple[str, str] | None:
        hint = _GPU_HINT if provider.startswith("CUDA") else "pip install eagle-export"
        try:
            import onnxruntime
        except ImportError as error:
            return f"onnxruntime cannot be imported: {error}", hint
        providers = onnxruntime.get_available_providers()
        return None if provider in providers else (f"this onnxruntime has no {provider}", hint)

    return lack


def _module(module: str, extra: str) -> Need:
    def lack() -> tuple[str, str] | None:
        check = _compiler(module, module, extra)
        return None if check.status == "ok" else (check.detail, check.hint)

    return lack


def _some_gpu(gpus: Sequence[Gpu]) -> Need:
    return lambda: None if gpus else ("no NVIDIA GPU here", "run on a machine with one")


def _torch_cuda() -> tuple[str, str] | None:
    """Whatever runs the graphs, what happens between them is torch's."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} cannot use the GPU", "install a torch build for CUDA"
