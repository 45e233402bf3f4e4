"""What is asked of the compiler and what comes back: plain data, since it runs in another process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_run.bundle.records import EngineInfo, EngineProfile
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.errors import UsageError

PROFILE_NAMES = ("prefill", "verify", "plain", "draft")
COMPATIBILITIES = ("none", "ampere_plus", "same_compute_capability")


@dataclass(frozen=True)
class EngineSettings:
    """How to compile; None leaves a setting to the library.

    capabilities: compute capabilities that the engine is for, from `architectures.check_architectures`.
    workspace_mib: most scratch memory that a kernel may take, in MiB. optimization_level: 0 (fast to compile)
    to 5 (fast to run). TensorRT only, since a TensorRT-RTX engine is finished on the GPU it runs on:
    hardware_compatibility ("ampere_plus": any GPU from sm80 on; "same_compute_capability": any of this one),
    version_compatible (later versions run it too), timing_cache (a file of kernel timings that is read, and
    extended afterwards).
    """

    capabilities: tuple[str, ...]
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    workspace_mib: int | None = None
    optimization_level: int | None = None
    timing_cache: Path | None = None

    def check(self, backend: str) -> None:
        """Raises UsageError for values that no compiler takes, and for what `backend` does not have."""
        if self.hardware_compatibility not in COMPATIBILITIES:
            raise UsageError(
                f"hardware compatibility should be one of {', '.join(COMPATIBILITIES)}, found "
                f"{self.hardware_compatibility!r}",
                parameters=["hardware_compatibility"],
            )
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise UsageError(
                f"the optimization level should be 0 to 5, found {self.optimization_level}",
                parameters=["optimization_level"],
            )
        if self.workspace_mib is not None and self.workspace_mib < 1:
            raise UsageError(
                f"the workspace should be at least 1 MiB, found {self.workspace_mib}",
                parameters=["workspace"],
            )
        if not self.capabilities:
            raise UsageError("an engine is for at least one compute capability")
        if backend == "tensorrt-rtx" and (
            self.hardware_compatibility != "none" or self.version_compatible or self.timing_cache is not None
        ):
            raise UsageError(
                "hardware compatibility, version compatibility and a timing cache are for TensorRT; "
                "a TensorRT-RTX engine is finished on the GPU it runs on",
                hint="leave them out; the architectures say which GPUs the engine is for",
                parameters=["hardware_compatibility", "version_compatible", "timing_cache", "target_arch"],
            )


@dataclass(frozen=True)
class EngineRequest:
    """One graph to compile. `spec` is the signature that its file must have; `out` is replaced when done.

    precision: "fp32", "fp16", "bf16" or "fp8"; it is in the graph already and only decides what to expect.
    """

    backend: str
    graph: str
    onnx: Path
    out: Path
    spec: GraphSpec
    precision: str
    profiles: tuple[EngineProfile, ...]
    settings: EngineSettings

    def to_json(self) -> dict[str, Any]:
        """For the compiler's process; `from_json` is the inverse."""
        settings = asdict(self.settings)
        settings["timing_cache"] = (
            None if self.settings.timing_cache is None else str(self.settings.timing_cache)
        )
        return {
            "backend": self.backend,
            "graph": self.graph,
            "onnx": str(self.onnx),
            "out": str(self.out),
            "spec": asdict(self.spec),
            "precision": self.precision,
            "profiles": [profile.model_dump(mode="json") for profile in self.profiles],
            "settings": settings,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineRequest:
        settings, spec = data["settings"], data["spec"]
        cache = settings["timing_cache"]
        return cls(
            backend=data["backend"],
            graph=data["graph"],
            onnx=Path(data["onnx"]),
            out=Path(data["out"]),
            spec=GraphSpec(spec["name"], _tensors(spec["inputs"]), _tensors(spec["outputs"])),
            precision=data["precision"],
            profiles=tuple(EngineProfile.model_validate(profile) for profile in data["profiles"]),
            settings=EngineSettings(
                **{
                    **settings,
                    "capabilities": tuple(settings["capabilities"]),
                    "timing_cache": None if cache is None else Path(cache),
                }
            ),
        )


@dataclass(frozen=True)
class CompiledEngine:
    """What a compile made: the engine lies at the request's `out`.

    library_version: "tensorrt-rtx 1.7.1.116". warnings: sentences for the user.
    """

    path: Path
    file_bytes: int
    info: EngineInfo
    library_version: str
    capabilities: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def _tensors(entries: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"])) for entry in entries)
