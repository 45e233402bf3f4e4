"""Are two sets of graphs the same function? And does a row's result depend on the rows beside it?

Both questions are put to graphs behind the runtime's own protocol, so that any backend can be compared with
the eager reference. B batch, T rows, N tree nodes, S cache rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_run.backends.base import Graph
from eagle_run.dtypes import DTYPES

# The largest difference that rounding explains, by precision: of logits, and of features and caches in units
# of their largest value.
LIMITS = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 5e-1}

_BATCH, _PREFIX, _NODES, _WIDTH = 2, 12, 7, 48
_LENGTHS = (5, 11)  # tokens of each sequence in front of its tree


@dataclass(frozen=True)
class Difference:
    """How far one output of a graph is from the reference, at most over all rows that were compared."""

    graph: str
    tensor: str
    value: float


def compare(
    graphs: Mapping[str, Graph], reference: Mapping[str, Graph], *, seed: int = 0
) -> list[Difference]:
    """Largest differences of each graph's outputs, over a prefill and a tree behind it, in a batch of two.

    Every graph gets the inputs that the reference pipeline gives it: an error shows in its own graph alone.
    Logits are compared as they are; features, hidden states and caches relative to their largest value.
    """
    worst: dict[tuple[str, str], float] = {}
    feeds = {name: (Feed(graphs[name]), Feed(reference[name])) for name in reference}
    for inputs in _forwards(feeds["target"][1], seed):
        wanted = _both(feeds["target"], "target", inputs, worst)
        if "draft" not in feeds:
            continue
        hidden = wanted["features"]
        if "fuse" in feeds:
            hidden = _both(feeds["fuse"], "fuse", {"features": hidden}, worst)["hidden"]
        _both(feeds["draft"], "draft", {**inputs, "hidden": hidden}, worst)
    return [Difference(graph, tensor, value) for (graph, tensor), value in worst.items()]


def row_dependence(graph: Graph, *, seed: int = 0) -> float:
    """The most that a target row's logits move when other rows join its forward, or are other tokens.

    Verifying a tree is exact only if this is rounding: a row must see its ancestors and nothing else. Dynamic
    quantisation of activations over a whole forward, for one, fails here.
    """
    feed = Feed(graph)
    prefix, tree = _forwards(feed, seed)
    feed(prefix)
    whole = feed(tree)["logits"]  # [B, N, V]
    # A row's mask is its ancestors' rows: alone it writes one row behind the prefix and sees only that.
    alone = feed({**tree, **_first_row(tree)})["logits"]  # [B, 1, V]
    moved = float((whole[:, :1] - alone).abs().max())
    changed = tree["input_ids"].clone()  # [B, N]
    path = _path(tree["tree_mask"], _NODES - 1)  # [B, N]: the last node's ancestors, itself included
    vocab = whole.shape[-1]
    changed = torch.where(path, changed, (changed + 1 + vocab // 2) % vocab)
    feed(prefix)
    other = feed({**tree, "input_ids": changed})["logits"]
    return max(moved, float(((whole - other).abs().amax(-1) * path).max()))


class Feed:
    """One graph with caches of its own, run at whatever shape its inputs have."""

    def __init__(self, graph: Graph, batch: int = _BATCH) -> None:
        self.graph = graph
        self.caches = {
            spec.name: torch.zeros(batch, *spec.shape[1:], dtype=DTYPES[spec.dtype].torch)  # type: ignore[arg-type]
            for spec in graph.spec.inputs
            if spec.name.startswith("past_")
        }

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on those of `inputs` that it takes; caches move on. Returns its other outputs."""
        tensors = {spec.name: inputs[spec.name] for spec in self.graph.spec.inputs if spec.name in inputs}
        sizes: dict[int | str, int] = {
            axis: size
            for spec in self.graph.spec.inputs
            if spec.name in tensors
            for axis, size in zip(spec.shape, tensors[spec.name].shape, strict=True)
        }
        outputs = {
            spec.name: torch.zeros(
                [int(sizes.get(axis, axis)) for axis in spec.shape], dtype=DTYPES[spec.dtype].torch
            )
            for spec in self.graph.spec.outputs
            if not spec.name.startswith("present_")
        }
        kept = {name.replace("past_", "present_"): cache for name, cache in self.caches.items()}
        self.graph.bind({**tensors, **self.caches, **kept, **outputs})()
        return outputs


def _both(
    feeds: tuple[Feed, Feed], graph: str, inputs: Mapping[str, Tensor], worst: dict[tuple[str, str], float]
) -> dict[str, Tensor]:
    """Runs both on the same inputs, notes how far apart they are, and returns what the reference gave."""
    found, wanted = feeds[0](inputs), feeds[1](inputs)
    pairs = {name: (found[name], wanted[name]) for name in wanted}
    if feeds[1].caches:
        pairs["cache"] = tuple(  # type: ignore[assignment]
            torch.stack([cache.float() for cache in feed.caches.values()]) for feed in feeds
        )
    for name, (a, b) in pairs.items():
        scale = 1.0 if name == "logits" else max(1.0, float(b.abs().max()))
        value = float((a.float() - b.float()).abs().max()) / scale
        worst[graph, name] = max(worst.get((graph, name), 0.0), value)
    return wanted


def _forwards(feed: Feed, seed: int) -> Iterator[dict[str, Tensor]]:
    """Inputs of a causal prefill, then of a random tree behind prefixes of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    specs = {spec.name: spec for spec in (*feed.graph.spec.inputs, *feed.graph.spec.outputs)}
    vocab, rows = int(specs["logits"].shape[-1]), int(specs["past_key.0"].shape[2])
    width = min(_WIDTH, rows)
    lengths = torch.tensor(_LENGTHS)
    column = torch.arange(width)
    steps = torch.arange(_PREFIX)
    yield {
        "input_ids": torch.randint(vocab, (_BATCH, _PREFIX), generator=generator),
        "position_ids": steps.expand(_BATCH, -1).contiguous(),
        "tree_mask": (column <= steps[:, None]).expand(_BATCH, 1, -1, -1).contiguous(),
        "write_index": torch.zeros(_BATCH, dtype=torch.int64),
        "logits_index": steps.expand(_BATCH, -1).contiguous(),
    }
    parents = [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, _NODES)]
    block = torch.eye(_NODES, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        block[node] |= block[parent]
    mask = (column < lengths[:, None])[:, None, None].repeat(1, 1, _NODES, 1)  # [B, 1, N, KV]
    for slot, length in enumerate(_LENGTHS):
        mask[slot, 0, :, length : length + _NODES] = block
    nodes = torch.arange(_NODES).expand(_BATCH, -1).contiguous()
    yield {
        "input_ids": torch.randint(vocab, (_BATCH, _NODES), generator=generator),
        "position_ids": lengths[:, None] + block.sum(1) - 1,
        "tree_mask": mask,
        "write_index": lengths,
        "logits_index": nodes,
    }


def _first_row(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The root of a tree's inputs as a forward of its own."""
    return {
        "input_ids": tree["input_ids"][:, :1].contiguous(),
        "position_ids": tree["position_ids"][:, :1].contiguous(),
        "tree_mask": tree["tree_mask"][:, :, :1].contiguous(),
        "logits_index": tree["logits_index"][:, :1].contiguous(),
    }


def _path(mask: Tensor, node: int) -> Tensor:
    """bool [B, N]: which rows the row `node` sees of the tree, from its mask [B, 1, N, KV]."""
    rows = [mask[slot, 0, node, length : length + _NODES] for slot, length in enumerate(_LENGTHS)]
    return torch.stack(rows)
