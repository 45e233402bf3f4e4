"""The library's enums for trtdouble.py, and the world around it, which a test sets up and reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

VERSIONS = {"tensorrt": "11.4.0.106", "tensorrt-rtx": "1.7.1.116"}
STREAM = 4711  # the handle that all work must come with


class Misuse(AssertionError):
    """What would be undefined behaviour with the library itself."""


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT8, INT32, INT64, BOOL = 0, 1, 7, 2, 3, 8, 4


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY, EAGER, NONE = range(3)


class CudaGraphStrategy(enum.Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class EngineValidity(enum.Enum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class EngineInvalidityDiagnostics(enum.IntEnum):
    VERSION_MISMATCH, UNSUPPORTED_CC, MALFORMED_ENGINE = 1, 2, 32


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


@dataclass
class World:
    """What is so outside the library, and what it was seen to do. `capturing` is set by who captures."""

    capability: str = "8.9"
    version: str = VERSIONS["tensorrt-rtx"]
    capturing: bool = False
    capturable: bool = True
    fail: str = ""  # the next run fails with this message
    contexts: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # of contexts, in order
    compiled: int = 0  # sets of shapes that kernels were compiled for
    scratch: set[tuple[int, int]] = field(default_factory=set)
