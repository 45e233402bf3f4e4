"""Finds TensorRT or TensorRT-RTX: one API in two modules, which compiles engines and runs them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from types import ModuleType

from eagle_run.bundle.engine_backends import MODULES
from eagle_run.bundle.tensors import TensorSpec
from eagle_run.dtypes import DTYPES
from eagle_run.errors import EagleError, UsageError, first_line

_EXTRAS = {"tensorrt": "tensorrt", "tensorrt-rtx": "rtx"}
# The oldest that imports opset 24 with native KV-cache updates; of RTX, the oldest that was tried.
_OLDEST = {"tensorrt": (10, 15), "tensorrt-rtx": (1, 7)}


@dataclass(frozen=True)
class Library:
    """The imported library. `backend` is our name for it, `version` as the module gives it."""

    module: ModuleType
    backend: str
    version: str

    @property
    def is_rtx(self) -> bool:
        return self.backend == "tensorrt-rtx"

    @property
    def label(self) -> str:
        """For a manifest: "tensorrt-rtx 1.7.1.116"."""
        return f"{self.backend} {self.version}"

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What this version of TensorRT-RTX can compile for, ascending; empty for TensorRT.

        TensorRT compiles for the GPU of the machine, whichever that is.
        """
        if not self.is_rtx:
            return ()
        found = (re.fullmatch(r"SM(\d+)(\d)", name) for name in self.module.ComputeCapability.__members__)
        numbers = sorted((int(match[1]), int(match[2])) for match in found if match)
        return tuple(f"{major}.{minor}" for major, minor in numbers)


def find_library(backend: str) -> Library:
    """Imports the library of a backend.

    Raises EagleError, with the command that helps, when it is not installed, cannot be imported (a missing
    or wrong CUDA library) or is too old; UsageError for a backend that has no engines.
    """
    if backend not in MODULES:
        raise UsageError(
            f"engines are compiled by {' or '.join(MODULES)}, found {backend!r}", parameters=["backend"]
        )
    install = f"pip install 'eagle-export[{_EXTRAS[backend]}]' (Linux or Windows, for NVIDIA GPUs)"
    name = MODULES[backend]
    if importlib.util.find_spec(name) is None:
        raise EagleError(f"{backend} is not installed: there is no Python module {name}", hint=install)
    try:
        module = importlib.import_module(name)
        version = str(module.__version__)
    except Exception as error:  # a broken installation fails in many ways: missing libraries, wrong CUDA
        raise EagleError(
            f"{backend} is installed but cannot be imported: {first_line(error)}",
            hint=f"its bindings and libraries must be of one version and of your CUDA; {install}",
        ) from error
    oldest = _OLDEST[backend]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < oldest:
        raise EagleError(
            f"{backend} {version} is too old: {'.'.join(map(str, oldest))} is the first that will do (ONNX "
            "opset 24 with KV-cache updates)",
            hint=install,
        )
    return Library(module, backend, version)


def declared(tensor: TensorSpec) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a tensor as the library declares it: "HALF", and -1 for a dynamic axis."""
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return DTYPES[tensor.dtype].tensorrt, shape
