"""How large the graphs of a model will be, from the headers of its weight files: nothing else is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_export.checkpoints import weights
from eagle_export.checkpoints.weights import SMALLEST_LINK
from eagle_run.dtypes import BY_PRECISION

if TYPE_CHECKING:
    from eagle_run.bundle.loading import Bundle

_LINEAR = re.compile(r"(?:^|\.)(?:layers\.\d+|midlayer)\..+\.(?:[qkvo]|gate|up|down)_proj\.weight$")
_LAYER = re.compile(r"(?:layers\.\d+|midlayer)\.")
_FUSE = re.compile(r"^(?:fc|input_norm|fc_norm)\.")
# Vocabulary maps, and the scales of checkpoints that are quantised already: nothing beside the weights.
_NOT_IN_GRAPH = re.compile(r"^(?:d2t|t2d)$|(?:_scale|_scale_inv|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Size:
    """Of a tensor in a checkpoint: its values, their type, and its bytes (0: in another's file)."""

    values: int
    dtype: str
    bytes: int


Sizes = dict[str, Size]  # of a checkpoint's tensors, by name


@dataclass(frozen=True)
class GraphWeights:
    """A graph to come: its decoder layers, and the bytes of its weights: in its precision, and in fp32.

    read_bytes: of its own weight files, as they are stored. held_bytes: of the largest product, which is held
    while it is written (an embedding is not: its rows stay rows). linked_bytes: of the weights that a build
    with `link_weights` leaves in the checkpoint's files; unlinked_held_bytes: held_bytes of the others.
    loaded_bytes: of torch's .bin files, which are in memory from beginning to end.
    """

    name: str
    layers: int
    bytes: int
    fp32_bytes: int
    read_bytes: int
    held_bytes: int = 0
    linked_bytes: int = 0
    unlinked_held_bytes: int = 0
    loaded_bytes: int = 0


def width_of(precision: str) -> int:
    """Bytes of a value that is not quantised; everything else of an fp8 graph has 16 bit."""
    return BY_PRECISION["fp16" if precision == "fp8" else precision].bytes


def weigh_checkpoints(
    target: Path,
    head: Path | None,
    precision: str,
    *,
    keep: Iterable[str] = (),
    lm_head: bool = False,
    base: str = "fp16",
) -> tuple[GraphWeights, ...]:
    """The graphs that a build makes of these model folders, in the order it makes them.

    keep, lm_head, base: as for fp8, patterns of linear layers that stay in 16 bit, whether lm_head does not,
    and the 16-bit type. Files of torch's .bin have no header to read: they count as the 16-bit linear layers
    that they mostly are.
    """
    from eagle_export.heads import names

    scale = _Scale(precision, tuple(keep), lm_head, base)
    stored, unread = _sizes(target)
    own = _language_part(stored)
    if _is_tied(target):
        own.pop("lm_head.weight", None)  # some files hold the one matrix twice, a graph does not
    graphs = [replace(scale.graph("target", own, unread), read_bytes=_bytes(stored) + unread)]
    if head is None:
        return tuple(graphs)
    stored, draft_unread = _sizes(head)
    draft = names.canonical(stored)
    if any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in draft):  # EAGLE-3 has a fuse
        fuse = {name: draft.pop(name) for name in list(draft) if _FUSE.match(name)}
        graphs.append(scale.graph("fuse", fuse, 0))
    if "embed_tokens.weight" not in draft and "model.embed_tokens.weight" in own:
        draft["embed_tokens.weight"] = replace(own["model.embed_tokens.weight"], bytes=0)  # its own copy
    output = own.get("lm_head.weight") or own.get("model.embed_tokens.weight")
    if "lm_head.weight" not in draft and output is not None:  # EAGLE-1 reads the target's
        draft["lm_head.weight"] = replace(output, bytes=0)
    return (*graphs, scale.graph("draft", draft, draft_unread))


def weigh_bundle(bundle: Bundle) -> tuple[GraphWeights, ...]:
    """The ONNX graphs that a bundle has, for compiling them."""
    manifest = bundle.manifest
    layers = {"target": manifest.target.layers, "draft": manifest.head.layers if manifest.head else 0}
    return tuple(
        GraphWeights(
            name=artifact.graph,
            layers=layers.get(artifact.graph, 0),
            bytes=(stored := sum(file.bytes for file in artifact.files)),
            fp32_bytes=stored * 4 // width_of(artifact.precision),
            read_bytes=stored,
        )
        for artifact in manifest.artifacts
        if artifact.backend == "onnx"
    )


@dataclass(frozen=True)
class _Scale:
    """Weighs tensors in a precision."""

    precision: str
    keep: tuple[str, ...]
    lm_head: bool
    base: str

    def graph(self, name: str, sizes: Sizes, unread: int) -> GraphWeights:
        """unread: bytes of files without a header."""
        weights_in_graph = {key: tensor for key, tensor in sizes.items() if not _NOT_IN_GRAPH.search(key)}
        width = width_of(self.precision)
        written = {key: tensor.values * self._width(key) for key, tensor in weights_in_graph.items()}
        linked = {key for key, tensor in weights_in_graph.items() if self._links(key, tensor)}
        together: Counter[str] = Counter()
        apart: Counter[str] = Counter()
        for key, tensor in weights_in_graph.items():
            if key.endswith("embed_tokens.weight"):
                continue
            held = tensor.bytes or written[key]
            together[_merged(key)] += held
            if key not in linked:
                apart[_merged(key)] += held
        return GraphWeights(
            name,
            layers=len({match[0] for key in weights_in_graph if (match := _LAYER.search(key))}),
            bytes=sum(written.values()) + unread // 2 * (1 if self.precision == "fp8" else width),
            fp32_bytes=sum(tensor.values for tensor in weights_in_graph.values()) * 4 + unread * 2,
            read_bytes=_bytes(sizes) + unread,
            held_bytes=max(together.values(), default=0),
            linked_bytes=sum(written[key] for key in linked),
            unlinked_held_bytes=max(apart.values(), default=0),
            loaded_bytes=unread // 2 * width,
        )

    def _width(self, key: str) -> int:
        """Bytes of a value in the graph."""
        return 1 if self._quantised(key) else width_of(self.precision)

    def _links(self, key: str, tensor: Size) -> bool:
        """Whether the graph has a weight as the checkpoint does, so that it could stay there."""
        kind = self.base if self.precision == "fp8" else self.precision
        small = tensor.values * width_of(self.precision) < SMALLEST_LINK
        return tensor.dtype == BY_PRECISION[kind].safetensors and not small and not self._quantised(key)

    def _quantised(self, key: str) -> bool:
        if self.precision != "fp8":
            return False
        if key == "lm_head.weight":
            return self.lm_head
        module = key.removesuffix(".weight")
        return bool(_LINEAR.search(key)) and not any(fnmatchcase(module, pattern) for pattern in self.keep)


def _merged(key: str) -> str:
    """One name for tensors that are written as one: the experts of a layer; q, k and v; gate and up."""
    key = re.sub(r"\bexperts\.\d+\.", "experts.", key)
    return re.sub(r"\b(?:gate|up)_proj\b", "gate_up_proj", re.sub(r"\b[qkv]_proj\b", "qkv_proj", key))


def _is_tied(folder: Path) -> bool:
    """Whether a target's lm_head is its embedding. A model that sees too says it of its language part."""
    config = weights.read_config(folder)
    part = config.get("text_config")
    return bool((part if isinstance(part, dict) else config).get("tie_word_embeddings"))


def _language_part(sizes: Sizes) -> Sizes:
    """Without vision towers, under the names that the language part has for itself."""
    from eagle_export.models.families import NO_TEXT, TEXT_KEYS

    renamed: Sizes = {}
    for name, tensor in sizes.items():
        if name.startswith(NO_TEXT):
            continue
        own = name
        for pattern, replacement in TEXT_KEYS.items():
            own = re.sub(pattern, replacement, own)
        renamed[own] = tensor
    return renamed


def _bytes(sizes: Sizes) -> int:
    return sum(tensor.bytes for tensor in sizes.values())


def _sizes(folder: Path) -> tuple[Sizes, int]:
    """Of all tensors in a model folder's weight files, and the bytes of the files that have no header."""
    sizes: Sizes = {}
    unread = 0
    for path in weights.model_files(folder):
        if path.suffix != ".safetensors":
            unread += path.stat().st_size
            continue
        for name, entry in weights.read_header(path).items():
            start, end = entry["data_offsets"]
            sizes[name] = Size(math.prod(entry["shape"]), entry["dtype"], end - start)
    return sizes, unread
