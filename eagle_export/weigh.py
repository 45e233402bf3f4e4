"""How large the graphs of a model will be, from the headers of its weight files: nothing else is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_export import weights

if TYPE_CHECKING:
    from eagle_run.bundle import Bundle

Sizes = dict[str, tuple[int, int]]  # of a checkpoint's tensors by name: values, stored bytes

WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}  # bytes of a value that is not quantised
_LINEAR = re.compile(r"(?:^|\.)(?:layers\.\d+|midlayer)\..+\.(?:[qkvo]|gate|up|down)_proj\.weight$")
_LAYER = re.compile(r"(?:layers\.\d+|midlayer)\.")
_FUSE = re.compile(r"^(?:fc|input_norm|fc_norm)\.")
# Vocabulary maps, and the scales of checkpoints that are quantised already: nothing beside the weights.
_NOT_IN_GRAPH = re.compile(r"^(?:d2t|t2d)$|(?:_scale|_scale_inv|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class GraphWeights:
    """A graph to come: its decoder layers, and the bytes of its weights: in its precision, and in fp32.

    read_bytes: of its own weight files, as they are stored.
    """

    name: str
    layers: int
    bytes: int
    fp32_bytes: int
    read_bytes: int


def weigh_checkpoints(
    target: Path,
    head: Path | None,
    precision: str,
    *,
    keep: Iterable[str] = (),
    lm_head: bool = False,
) -> tuple[GraphWeights, ...]:
    """The graphs that a build makes of these model folders, in the order it makes them.

    keep, lm_head: as for fp8, patterns of linear layers that stay in 16 bit, and whether lm_head does not.
    Files of torch's .bin have no header to read: they count as the 16-bit linear layers that they mostly are.
    """
    scale = _Scale(precision, tuple(keep), lm_head)
    base, unread = _sizes(target)
    if weights.read_config(target).get("tie_word_embeddings"):
        base.pop("lm_head.weight", None)  # some files hold the one matrix twice, a graph does not
    graphs = [scale.graph("target", base, unread)]
    if head is None:
        return tuple(graphs)
    draft, draft_unread = _sizes(head)
    if any(name.startswith("midlayer.") for name in draft):  # EAGLE-3: fc is a graph of its own
        fuse = {name: draft.pop(name) for name in list(draft) if _FUSE.match(name)}
        graphs.append(scale.graph("fuse", fuse, 0))
    if "embed_tokens.weight" not in draft and "model.embed_tokens.weight" in base:
        draft["embed_tokens.weight"] = base["model.embed_tokens.weight"][0], 0  # each graph has its own copy
    if "lm_head.weight" not in draft and "lm_head.weight" in base:  # EAGLE-1 reads the target's
        draft["lm_head.weight"] = base["lm_head.weight"][0], 0
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
            fp32_bytes=stored * 4 // WIDTHS[artifact.precision],
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

    def graph(self, name: str, sizes: Sizes, unread: int) -> GraphWeights:
        """unread: bytes of files without a header."""
        counts = {key: count for key, (count, _) in sizes.items() if not _NOT_IN_GRAPH.search(key)}
        width = WIDTHS[self.precision]
        stored = sum(count * (1 if self._quantised(key) else width) for key, count in counts.items())
        return GraphWeights(
            name,
            layers=len({match[0] for key in counts if (match := _LAYER.search(key))}),
            bytes=stored + unread // 2 * (1 if self.precision == "fp8" else width),
            fp32_bytes=sum(counts.values()) * 4 + unread * 2,
            read_bytes=sum(read for _, read in sizes.values()) + unread,
        )

    def _quantised(self, key: str) -> bool:
        if self.precision != "fp8":
            return False
        if key == "lm_head.weight":
            return self.lm_head
        module = key.removesuffix(".weight")
        return bool(_LINEAR.search(key)) and not any(fnmatchcase(module, pattern) for pattern in self.keep)


def _sizes(folder: Path) -> tuple[Sizes, int]:
    """Of all tensors in a model folder's weight files, and the bytes of the files that have no header."""
    sizes: Sizes = {}
    unread = 0
    for path in weights.weight_files(folder):
        if path.suffix != ".safetensors":
            unread += path.stat().st_size
            continue
        for name, entry in weights.read_header(path).items():
            start, end = entry["data_offsets"]
            sizes[name] = math.prod(entry["shape"]), end - start
    return sizes, unread
