"""What the compiler made of a graph: read from the list of layers that it logs when it is done.

An engine can only be inspected on a GPU, but with ProfilingVerbosity.DETAILED and a VERBOSE logger the
compiler prints the same list at build time. It is one list for all profiles: the number behind "_myl" counts
compiled subgraphs, and the layers and tensors of the second profile and up are marked "[profile 1]".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from eagle_run.bundle.records import LayerSummary

TYPES = {"Half": "fp16", "BFloat16": "bf16", "Float": "fp32", "FP8": "fp8", "E4M3": "fp8"}
_PROFILE = re.compile(r"\[profile (\d+)\]")
_TENSOR = re.compile(r"Dimensions: \[([-\d,]*)\].*?Datatype: (\w+)")
_HOST = ("shape_call",)  # not a launch: sizes computed by the host


@dataclass(frozen=True)
class Tensor:
    """An operand as the list shows it; -1 for dynamic sizes."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_matrix(self) -> bool:
        return len([size for size in self.shape if size != 1]) >= 2


@dataclass(frozen=True)
class Layer:
    """One line of the list. nodes: names of the ONNX nodes that went into it."""

    name: str
    kind: str
    group: str
    profile: int | None
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    nodes: tuple[str, ...]


class LayerLog:
    """Collects, from the messages of a build, what `summaries` needs; the rest (most of it) is not kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, message: str) -> None:
        """Takes a message of the library's logger, whatever it is about."""
        if "LayerType: " in message or "Scratch Memory: " in message:
            self.lines += [
                line for line in message.splitlines() if "LayerType: " in line or "Scratch Memory: " in line
            ]

    def summaries(self, profiles: int, matmuls: Collection[str]) -> tuple[LayerSummary | None, ...]:
        """One summary a profile; None for all where the list is absent or cannot be told apart.

        matmuls: names of the graph's MatMul nodes.
        """
        layers = list(parse_layers(self.lines))
        scratch = _scratch(self.lines)
        by_profile: dict[int, list[Layer]] = defaultdict(list)
        for layer in layers:
            if layer.profile is not None:
                by_profile[layer.profile].append(layer)
        if sorted(by_profile) != list(range(profiles)):
            return (None,) * profiles
        return tuple(_summary(by_profile[i], matmuls, scratch.get(i, 0)) for i in range(profiles))


def parse_layers(lines: Iterable[str]) -> Iterable[Layer]:
    """Layers of a list, each with the profile of its subgraph."""
    listed = [line for line in map(str.strip, lines) if line.startswith("Name: ") and "LayerType: " in line]
    marks: dict[str, set[int]] = defaultdict(set)
    for line in listed:
        marks[_group(line)] |= {int(number) for number in _PROFILE.findall(line)}
    for line in listed:
        group = _group(line)
        profile = min(marks[group], default=0) if len(marks[group]) <= 1 else None
        sections = re.search(r"Inputs: \[(.*?)\], Constants: \[(.*?)\], Outputs: \[", line)
        inputs, constants = sections.groups() if sections else ("", "")
        yield Layer(
            name=line[len("Name: ") :].partition(", LayerType: ")[0],
            kind=line.partition("LayerType: ")[2].partition(",")[0],
            group=group,
            profile=profile,
            inputs=_tensors(inputs),
            constants=_tensors(constants),
            nodes=tuple(re.findall(r"\[ONNX Layer: (.*?)\]", line.partition("Metadata: ")[2])),
        )


def _group(line: str) -> str:
    """The compiled subgraph of a layer; layers outside of one go by their profile's mark."""
    name = line.partition(", LayerType: ")[0]
    match = re.search(r"_(myl\d+)_\d+$", name)
    if match:
        return match[1]
    mark = _PROFILE.search(line)
    return mark[0] if mark else ""


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(tuple(int(size) for size in sizes.split(",") if size), TYPES.get(dtype, dtype.lower()))
        for sizes, dtype in _TENSOR.findall(text)
    )


def _scratch(lines: Iterable[str]) -> dict[int, int]:
    """Scratch bytes by profile: the most that one layer takes, since they follow each other."""
    most: dict[int, int] = {}
    for line in lines:
        amount = re.search(r"Scratch Memory: (\d+) bytes", line)
        if amount and line.lstrip().startswith("Layer: "):
            mark = _PROFILE.search(line)
            profile = int(mark[1]) if mark else 0
            most[profile] = max(most.get(profile, 0), int(amount[1]))
    return most


def _summary(layers: Sequence[Layer], matmuls: Collection[str], scratch: int) -> LayerSummary:
    attention = Counter(_stem(layer.name) for layer in layers if "mha" in layer.name)
    gemms = Counter(_operands(layer) for layer in _products(layers, matmuls))
    kernels = sum(layer.kind not in _HOST for layer in layers)
    return LayerSummary(kernels=kernels, attention=dict(attention), gemms=dict(gemms), scratch_bytes=scratch)


def _products(layers: Sequence[Layer], matmuls: Collection[str]) -> list[Layer]:
    """The launch that computes each MatMul, once where several MatMuls share one.

    A product is a layer of its own kind or hides in a fusion (with the addition behind it); a kernel that
    only prepares or converts its operands names the node too, but has no matrix of weights.
    """
    holders: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        for node in layer.nodes:
            if node in matmuls:
                holders[node].append(layer)
    chosen = {}
    for candidates in holders.values():
        best = min(candidates, key=lambda layer: (layer.kind != "gemm", _weight(layer) is None))
        chosen[best.name] = best
    return list(chosen.values())


def _weight(layer: Layer) -> Tensor | None:
    """The largest constant matrix [K, N] of a layer."""
    matrices = [tensor for tensor in layer.constants if tensor.is_matrix]
    return max(matrices, key=lambda tensor: tensor.shape[0] * tensor.shape[-1], default=None)


def _operands(layer: Layer) -> str:
    """Types of rows and weights: "fp16" where both are, else "fp16xfp8"."""
    weight = _weight(layer)
    inputs = [tensor for tensor in layer.inputs if tensor.is_matrix]
    if weight is None:  # made from other tensors while running: weights that were stored in another type
        kinds = [tensor.dtype for tensor in inputs[:2]]
    else:
        # A fusion has more inputs than the product (what is added to it): rows end in K.
        rows = [tensor.dtype for tensor in inputs if tensor.shape[-1] in (weight.shape[-2], -1)]
        kinds = [weight.dtype if weight.dtype in rows else (rows or ["?"])[0], weight.dtype]
    return kinds[0] if len(set(kinds)) == 1 else "x".join(kinds)


def _stem(name: str) -> str:
    """ "_gemm_mha_v2_myl0_15" -> "_gemm_mha_v2"."""
    return re.sub(r"( \[profile \d+\])?_myl\d+_\d+$", "", name)
