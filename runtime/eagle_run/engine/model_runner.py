"""Owns what outlives a round: the graphs, the KV caches, the buffers they are bound to, the slots' state.

A forward has fixed shapes (B slots, T rows, R logit rows, KV attended rows). Its buffers are made and bound
once, the first time the shapes are seen, and reused by every later forward of these shapes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_run.backends.base import Graph, Run
from eagle_run.backends.padding import padded_graph
from eagle_run.backends.stream import on_stream
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.decoding.drafting import TreeTables
from eagle_run.decoding.sampling import SamplingTensors
from eagle_run.decoding.tree import TreeShape
from eagle_run.dtypes import DTYPES
from eagle_run.errors import EagleError


@dataclass(frozen=True)
class Forward:
    """One graph at fixed shapes: fill `inputs`, call `run`, read `outputs`."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    run: Run


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a round's tokens under the target: P tokens a slot, K alternatives each.

    chosen f32 [B, P] and rank i64 [B, P] (1: the likeliest) of the emitted tokens; top f32 [B, P, K] and
    top_ids i64 [B, P, K] of the likeliest ones. What is behind a path's end means nothing.
    """

    chosen: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor

    @property
    def alternatives(self) -> int:
        return self.top.shape[2]


@dataclass
class BatchState:
    """The slots of a batch between two rounds; every field is a device tensor of fixed shape.

    n = `length` tokens have their KV in the target cache; `root` is the token after them, which has none.
    `pending_*` are the pairs (feature f_t, token x_{t+1}) that the draft cache still lacks: `pending_count`
    of them, the last ones of the n pairs (EAGLE §4.1; facts on the draft cache in docs/glossary.md).
    """

    length: Tensor  # i64 [B]
    root: Tensor  # i64 [B]
    pending_features: Tensor  # [B, P, n*H]
    pending_tokens: Tensor  # i64 [B, P]
    pending_count: Tensor  # i64 [B]
    active: Tensor  # bool [B]; a finished slot computes on but neither grows nor emits
    limit: Tensor  # i64 [B]: with this many tokens in its cache a slot is finished
    emitted: Tensor  # i64 [B, 1 + P]: of the last round, path length and emitted tokens: what the host reads
    sampling: SamplingTensors
    logprobs: TokenLogprobs | None = None  # of the emitted tokens, where some request asks for them

    def retire(self, slot: int) -> None:
        """Ends a slot. It goes on computing, at the start of its caches, where it needs no room."""
        self.active[slot] = False
        self.length[slot] = 0
        self.pending_count[slot] = 0

    def retire_full(self) -> None:
        """Ends the slots that have come to their limit, without asking the host."""
        self.active &= self.length < self.limit
        self.length *= self.active
        self.pending_count *= self.active


@dataclass
class Clock:
    """Seconds spent inside each graph since the last `reset`, by the host's clock.

    So only backends that block are timed: on a GPU a call returns long before its work is done.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, run: Run) -> Run:
        def timed_run() -> None:
            start = time.perf_counter()
            run()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed_run

    def reset(self) -> None:
        self.seconds.clear()


class ModelRunner:
    """`batch` slots over the graphs of a bundle.

    `graphs` holds "target" and, for speculative decoding, "draft" and (unless the head has none) "fuse".
    `draft_to_target` i64 [Vd] maps draft vocabulary ids to target ids. Without a draft only plain decoding
    is possible. Raises EagleError when graphs of different models are put together.

    Prompts are prefilled one slot at a time, in caches of one slot ("staged"), and then adopted by their
    slot: shapes of a prefill do not depend on the batch, nor its memory on the slot, and a prompt's rows are
    those that a batch of one would give. In a batch of one the staging caches are the caches.

    `precision` is that of the target graph, which decides how it must be padded (`PaddedGraph`).
    """

    def __init__(
        self,
        graphs: Mapping[str, Graph],
        *,
        batch: int,
        draft_to_target: Tensor | None = None,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.precision = precision
        self.graphs = {**graphs, "target": padded_graph(graphs["target"], precision)}
        self.batch = batch
        self.device = torch.device(device)
        self.clock = Clock()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # weights may have been made on another stream
        self.target_cache = self._new_cache(graphs["target"].spec, batch)  # [L, 2, B, Hkv, S, Dh]
        self._caches = {"target": self.target_cache}
        self.draft_to_target: Tensor | None = None
        self.has_draft = "draft" in graphs
        if self.has_draft:
            if draft_to_target is None:
                raise EagleError("a draft graph needs the map from draft to target vocabulary")
            self.draft_cache = self._caches["draft"] = self._new_cache(graphs["draft"].spec, batch)
            self.draft_to_target = draft_to_target.to(self.device)
            _check_pair(graphs, len(draft_to_target))
        self._staging: dict[str, Tensor] = {}
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._forwards: dict[tuple[object, ...], Forward] = {}
        self._tables: dict[TreeShape, TreeTables] = {}

    @property
    def cache_rows(self) -> int:
        """Rows that both caches have: no forward may write beyond them."""
        caches = [self.target_cache] + ([self.draft_cache] if self.has_draft else [])
        return min(cache.shape[4] for cache in caches)

    @property
    def timed(self) -> bool:
        """Whether `clock` tells the time of graphs."""
        return self.device.type == "cpu"

    @property
    def capturable(self) -> bool:
        """Whether rounds may be captured as CUDA graphs."""
        return all(graph.capturable for graph in self.graphs.values())

    @property
    def feature_size(self) -> int:
        return int(self.graphs["target"].spec.tensor("features").shape[-1])

    def target(self, rows: int, logit_rows: int, kv: int, *, staged: bool = False) -> Forward:
        """The target over `rows` tokens a slot, logits of `logit_rows` of them, attending to `kv` rows."""
        return self._forward("target", staged, rows, logit_rows, kv)

    def draft(self, rows: int, logit_rows: int, kv: int, *, staged: bool = False) -> Forward:
        """The draft over `rows` (hidden, token) pairs a slot."""
        return self._forward("draft", staged, rows, logit_rows, kv)

    def adopt(self, slot: int, rows: int) -> None:
        """Gives `slot` the first `rows` rows of the staging caches."""
        if self.batch == 1:
            return
        for name, staging in self._staging.items():
            self._caches[name][:, :, slot, :, :rows] = staging[:, :, 0, :, :rows]

    def tables(self, shape: TreeShape) -> TreeTables:
        """The constants of a tree shape on this device, made the first time it is used."""
        if shape not in self._tables:
            self._tables[shape] = TreeTables.build(shape, self.device)
        return self._tables[shape]

    def fuse(self, features: Tensor, *, staged: bool = False) -> Tensor:
        """features [B, T, n*H] of the target → what the draft takes as hidden [B, T, Hd] (EAGLE-3 §3.1).

        A head without a fuse graph (EAGLE-1) takes the feature itself.
        """
        if "fuse" not in self.graphs:
            return features
        forward = self._forward("fuse", staged, features.shape[1], 0, 0)
        forward.inputs["features"].copy_(features)
        forward.run()
        return forward.outputs["hidden"]

    def new_state(self, path_rows: int, sampling: SamplingTensors) -> BatchState:
        """An empty batch whose rounds emit at most `path_rows` tokens a slot."""
        batch, device = self.batch, self.device
        dtype = DTYPES[self.graphs["target"].spec.tensor("features").dtype].torch

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return BatchState(
            length=zeros(batch),
            root=zeros(batch),
            pending_features=torch.zeros(batch, path_rows, self.feature_size, dtype=dtype, device=device),
            pending_tokens=zeros(batch, path_rows),
            pending_count=zeros(batch),
            active=torch.ones(batch, dtype=torch.bool, device=device),
            limit=torch.full((batch,), self.cache_rows, device=device),
            emitted=zeros(batch, 1 + path_rows),
            sampling=sampling,
        )

    def new_logprobs(self, path_rows: int, alternatives: int) -> TokenLogprobs:
        """Room for the log-probabilities of a round's tokens and of so many likeliest ones beside each."""
        places, device = (self.batch, path_rows), self.device
        return TokenLogprobs(
            chosen=torch.zeros(places, device=device),
            rank=torch.zeros(places, dtype=torch.int64, device=device),
            top=torch.zeros(*places, alternatives, device=device),
            top_ids=torch.zeros(*places, alternatives, dtype=torch.int64, device=device),
        )

    def _forward(self, name: str, staged: bool, rows: int, logit_rows: int, kv: int) -> Forward:
        key = (name, staged, rows, logit_rows, kv)
        if key not in self._forwards:
            sizes = {"B": 1 if staged else self.batch, "T": rows, "R": logit_rows, "KV": kv}
            self._forwards[key] = self._bind(name, self._cache(name, staged), sizes, staged)
        return self._forwards[key]

    def _cache(self, name: str, staged: bool) -> Tensor | None:
        """The cache that a forward writes; None for the fuse, which has none."""
        if not staged or self.batch == 1 or name not in self._caches:
            return self._caches.get(name)
        if name not in self._staging:
            self._staging[name] = self._new_cache(self.graphs[name].spec, 1)
        return self._staging[name]

    def _bind(self, name: str, cache: Tensor | None, sizes: dict[str, int], staged: bool) -> Forward:
        graph = self.graphs[name]
        tensors: dict[str, Tensor] = {}
        for spec in (*graph.spec.inputs, *graph.spec.outputs):
            if cache is not None and spec.name.startswith(("past_", "present_")):
                tensors[spec.name] = _layer(cache, spec.name)
            else:
                shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape)
                tensors[spec.name] = self._buffer(name, spec.name, shape, DTYPES[spec.dtype].torch)
        run = graph.bind(tensors, shared=staged)
        if self.timed:
            run = self.clock.timed(name, run)
        inputs = {spec.name: tensors[spec.name] for spec in graph.spec.inputs}
        return Forward(inputs, {spec.name: tensors[spec.name] for spec in graph.spec.outputs}, run)

    def _buffer(self, graph: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Forwards that differ only in other axes share a buffer: only one forward runs at a time."""
        key = (graph, name, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._buffers[key]

    def _new_cache(self, spec: GraphSpec, batch: int) -> Tensor:
        layers = sum(value.name.startswith("past_key.") for value in spec.inputs)
        past = spec.tensor("past_key.0")
        _, heads, rows, width = past.shape
        shape = (layers, 2, batch, int(heads), int(rows), int(width))
        with on_stream(self.device):
            return torch.zeros(shape, dtype=DTYPES[past.dtype].torch, device=self.device)


def _layer(cache: Tensor, name: str) -> Tensor:
    """past_key.3 / present_value.3 → that layer's [B, Hkv, S, Dh] inside the stacked cache."""
    kind, layer = name.rsplit(".", 1)
    return cache[int(layer), int(kind.endswith("value"))]


def _check_pair(graphs: Mapping[str, Graph], draft_vocab: int) -> None:
    """The graphs of one bundle fit by construction; graphs put together by hand may not."""
    features = graphs["target"].spec.tensor("features").shape[-1]
    consumer, tensor = ("fuse", "features") if "fuse" in graphs else ("draft", "hidden")
    taken = graphs[consumer].spec.tensor(tensor).shape[-1]
    if features != taken:
        raise EagleError(
            f"the target gives features of width {features}, but the {consumer} graph takes {taken}",
            hint="export the target with the feature layers of this head",
        )
    logits = graphs["draft"].spec.tensor("logits").shape[-1]
    if logits != draft_vocab:
        raise EagleError(f"the draft has {logits} logits, but its vocabulary map has {draft_vocab} entries")
