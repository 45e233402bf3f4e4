"""What an FP8 graph must know of its activations: one scale for the input of each linear layer.

A value x is stored as the FP8 number nearest to x / scale. E4M3 reaches 448, so the scale of an input whose
largest magnitude is `amax` is amax / 448. Scales are fixed when a graph is built: a scale that followed the
rows of a forward would make a row's result depend on its neighbours, and verifying a tree would not be exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import TypeAdapter

from eagle_run.errors import EagleError, UsageError, first_line
from eagle_run.json_files import parse_json, read_bytes

LARGEST = 448.0  # of E4M3
DEFAULT_KEPT = ("lm_head", "fc")  # 16 bit unless asked for: few rows, or what everything else reads
# Largest magnitudes of the 16-bit types; beyond half of fp16's range there is no room for another prompt.
_RANGE = {"fp16": 65504.0}
_ROOM = 30000.0
_FORMAT = 1
_MAKE = "make one by building in fp8"
_LEAST, _MOST = 2.0**-126, 3.4e38  # normal numbers of float32
SOURCES = ("calibrated", "modelopt", "compressed-tensors", "fp8")


@dataclass(frozen=True)
class Scales:
    """Input scales by graph ("target", "draft", "fuse") and linear layer, named as in the checkpoint.

    source: "calibrated", or the dialect of the checkpoint that brought the target's scales.
    tokens: positions that calibration saw. peaks: the largest magnitude between layers, by graph.
    target_sha256, head_sha256: the weights they belong to; head_sha256 is None without a head.
    kept: patterns of the layers that `choose` left out.
    """

    inputs: Mapping[str, Mapping[str, float]]
    peaks: Mapping[str, float]
    tokens: int
    source: str = "calibrated"
    target_sha256: str | None = None
    head_sha256: str | None = None
    kept: tuple[str, ...] = field(default=())

    @property
    def linears(self) -> int:
        """How many linear layers have a scale."""
        return sum(map(len, self.inputs.values()))

    def save(self, path: Path) -> None:
        """Writes a JSON file that `load` reads back exactly. Raises EagleError when it cannot be written."""
        try:
            path.write_text(
                json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise EagleError(f"{path}: the scales cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Scales:
        """Reads what `save` wrote. Raises EagleError for anything else."""
        try:
            data = parse_json(read_bytes(path), f"{path}: not a file of scales", hint=_MAKE)
            version = data.pop("format")
            if version != _FORMAT:
                raise EagleError(
                    f"{path}: expected scales in format {_FORMAT}, found {version}", hint="calibrate again"
                )
            if unknown := sorted(set(data) - set(cls.__dataclass_fields__)):
                raise ValueError(f"unknown keys {unknown}")
            scales = TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
            if scales.source not in SOURCES or not all(map(math.isfinite, scales.peaks.values())):
                raise ValueError(f"source {scales.source!r} and peaks {dict(scales.peaks)} cannot be")
            for layers in scales.inputs.values():
                check_positive(layers, str(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EagleError(
                f"{path}: not a file of scales: {first_line(error)}", hint=_MAKE, parameters=["scales"]
            ) from None
        return scales

    def check_identity(self, target_sha256: str, head_sha256: str | None) -> None:
        """Raises EagleError unless these scales belong to this target, and to this head if there is one."""
        pairs = [("target", self.target_sha256, target_sha256)]
        if head_sha256 is not None:
            pairs.append(("head", self.head_sha256, head_sha256))
        for part, mine, theirs in pairs:
            if mine != theirs:
                raise EagleError(
                    f"the scales are of another {part}: expected sha256 {theirs[:12]}…, found "
                    f"{mine[:12] + '…' if mine else 'none'}",
                    hint="calibrate again: build without a file of scales",
                    parameters=["scales"],
                )

    def check_range(self, base: str) -> list[str]:
        """Will activations fit the 16-bit type around the FP8 products? Returns warnings.

        Raises EagleError when calibration itself saw values beyond the type's range.
        """
        most = _RANGE.get(base)
        notes: list[str] = []
        if most is None:
            return notes
        for graph in sorted({*self.inputs, *self.peaks}):
            layers = self.inputs.get(graph, {})
            places = {name: scale * LARGEST for name, scale in layers.items()}
            places["the residual stream"] = self.peaks.get(graph, 0.0)
            where, value = max(places.items(), key=lambda item: item[1])
            if value > most:
                raise EagleError(
                    f"{graph}: activations reach {value:.0f} at {where}; {base} ends at {most:.0f}",
                    hint="take bf16 as the 16-bit type",
                )
            if value > _ROOM:
                notes.append(f"{graph}: activations reach {value:.0f} at {where}; {base} ends at {most:.0f}")
        return notes


def check_positive(layers: Mapping[str, float], where: str) -> None:
    """Raises EagleError unless every scale is a positive, normal number of float32, as graphs store it."""
    for name, scale in layers.items():
        if not _LEAST <= scale <= _MOST:
            raise EagleError(
                f"{where}: the scale of {name} is {scale}, expected a positive number of float32"
            )


def choose(scales: Scales, keep: Sequence[str] = (), also: Sequence[str] = ()) -> Scales:
    """The scales of the layers to quantise.

    keep: patterns (*, ?, [...]) of layers that stay in 16 bit beside DEFAULT_KEPT, such as "*.down_proj" or
    "model.layers.0.*". also: patterns of layers to quantise although DEFAULT_KEPT names them. Layers whose
    product is merged in the graph (q, k, v; gate, up) stay together: keeping one keeps its group.

    Raises UsageError for a pattern that matches nothing, listing what there is.
    """
    names = sorted({name for layers in scales.inputs.values() for name in layers})
    for pattern in (*keep, *also):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"no linear layer is called {pattern!r}",
                hint="there are " + ", ".join(sorted({starred(name) for name in names})),
                parameters=["keep"],
            )
    kept = tuple(dict.fromkeys((*keep, *(default for default in DEFAULT_KEPT if default not in also))))

    def wanted(name: str) -> bool:
        if _matches(name, keep):
            return False
        return _matches(name, also) or not _matches(name, DEFAULT_KEPT)

    inputs = {
        graph: {name: scale for name, scale in layers.items() if wanted(name)}
        for graph, layers in scales.inputs.items()
    }
    inputs = {graph: layers for graph, layers in inputs.items() if layers}
    if not inputs:
        raise UsageError(
            "no linear layer is left to quantise",
            hint="keep fewer, or build in fp16",
            parameters=["keep", "precision"],
        )
    return replace(scales, inputs=inputs, kept=kept)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def starred(name: str) -> str:
    """model.layers.7.mlp.up_proj -> model.layers.*.mlp.up_proj, so that a list of them stays short."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
