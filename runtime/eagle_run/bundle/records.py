"""The small records that a manifest is made of: files, tensors, engines, accuracy. Frozen, strict.

docs/format.md is their prose. Nothing here imports torch, so that looking at a bundle starts fast.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle_run.errors import EagleError

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Axis = Literal["B", "T", "R", "KV"]


class Record(BaseModel):
    """Base of everything read from a file: frozen, strict, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(Record):
    """A file of the bundle; `path` is relative to the bundle, with forward slashes.

    `origin`: of a file that was linked, not written: the model folder and file that it is another name of.
    """

    path: str
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256
    origin: str | None = None

    @model_validator(mode="after")
    def _inside(self) -> FileEntry:
        parts = PurePosixPath(self.path)
        if (
            not self.path
            or parts.is_absolute()
            or ".." in parts.parts
            or "\\" in self.path
            or ":" in self.path
        ):
            raise ValueError(f"path {self.path!r} must be relative and stay inside the bundle")
        return self


class AxisRange(Record):
    """Sizes that a dynamic axis may have in one profile; kernels were chosen for `opt`."""

    min: Count
    opt: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> AxisRange:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"sizes must ascend, found {self.min}, {self.opt}, {self.max}")
        return self


class LayerSummary(Record):
    """What a compiler made of a graph in one profile, from its own list of layers.

    kernels: launches of one forward. attention: fused attention kernels by name. gemms: matrix products by
    the type of their operands (fp8, fp16, bf16, fp32, or "fp16xfp8" where the two differ).
    """

    kernels: Size
    attention: dict[str, Count]
    gemms: dict[str, Count]
    scratch_bytes: Size


class EngineProfile(Record):
    """One optimization profile: the sizes of each dynamic axis, and the layers chosen for them.

    `layers` is null where the compiler did not say.
    """

    name: str
    axes: dict[Axis, AxisRange]
    layers: LayerSummary | None = None


class EngineInfo(Record):
    """How an engine was compiled and what it may run on. Profiles are in the engine's order.

    attention_layers, cache_updates: native layers of these kinds in the parsed network.
    seconds, peak_memory_bytes: of the compiler's process.
    """

    profiles: Annotated[tuple[EngineProfile, ...], Field(min_length=1)]
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    attention_layers: Size
    cache_updates: Size
    seconds: Annotated[float, Field(ge=0)]
    peak_memory_bytes: Size


class QuantizationInfo(Record):
    """Where the FP8 scales of a bundle come from.

    source: "calibrated" (on `tokens` tokens of prompts and answers), or the dialect of a checkpoint that
    brought them.
    kept: patterns of the linear layers that stayed in 16 bit. scales: file of the scales, for the next build.
    """

    source: Literal["calibrated", "modelopt", "compressed-tensors", "fp8"]
    base: Literal["fp16", "bf16", "fp32"]
    tokens: Size
    linears: Size
    kept: tuple[str, ...]
    scales: FileEntry | None = None


class AccuracyInfo(Record):
    """The target in its precision against the same weights in float32, teacher-forced over real text.

    backend: what ran the bundle's precision, its ONNX graphs or (bf16 on a CPU) the modules they came from.
    tokens: compared positions, of `prompts` prompts and float32's greedy answers to them. top1_agreement:
    share of them with the same most likely token. kl: mean of KL(fp32 || this) in nats. perplexity: of those
    tokens. tokens_per_round: with the bundle's tree at temperature 0 on the same prompts, each precision
    answering by itself; null without a head.
    """

    backend: Literal["onnxruntime", "eager"]
    prompts: Count
    tokens: Count
    top1_agreement: Share
    kl: Annotated[float, Field(ge=0)]
    perplexity: Annotated[float, Field(ge=1)]
    reference_perplexity: Annotated[float, Field(ge=1)]
    tokens_per_round: Annotated[float, Field(ge=1)] | None
    reference_tokens_per_round: Annotated[float, Field(ge=1)] | None


class BuildInfo(Record):
    """How the bundle was made: wall time, peak resident memory, versions of the libraries."""

    seconds: Annotated[float, Field(ge=0)]
    peak_memory_bytes: Annotated[int, Field(ge=0)]
    versions: dict[str, str]


def explain(error: ValidationError, model: type[BaseModel], where: str) -> EagleError:
    """The first fault of a failed validation of `model`, as an EagleError that names file and key."""
    # A misspelt key is unknown and missing at once; only the former says what to do.
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in fault["loc"])
    more = f" ({error.error_count() - 1} more faults)" if error.error_count() > 1 else ""
    if fault["type"] == "extra_forbidden":
        known = _fields_at(model, fault["loc"][:-1])
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        return EagleError(
            f"{where}: unknown key {key!r}{more}", hint=f"{guess}known keys: {', '.join(known)}"
        )
    if fault["type"] == "missing":
        return EagleError(
            f"{where}: missing key {key!r}{more}",
            hint="the file is incomplete; add the key or make the file again",
        )
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if isinstance(fault["input"], dict | BaseModel) else f", found {fault['input']!r}"
    return EagleError(f"{where}: {key + ': ' if key else ''}{message}{found}{more}")


def _fields_at(model: type, loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the record that `loc` points into, seen through optionals, tuples and dicts."""
    for part in loc:
        field = _fields_of(model).get(str(part))
        inner = next(_records_in(getattr(field, "annotation", None)), None)
        model = inner or model
    return list(_fields_of(model))


def _fields_of(model: type) -> dict[str, Any]:
    """Of a record, or of a dataclass inside one."""
    name = "model_fields" if issubclass(model, BaseModel) else "__dataclass_fields__"
    fields: dict[str, Any] = getattr(model, name, {})
    return fields


def _records_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and _fields_of(annotation):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _records_in(argument)
