"""The manifest of a bundle: frozen, strict, versioned records. docs/format.md is its prose.

Nothing here imports torch, transformers or onnx, so that a command line which only looks at a bundle
starts fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from eagle_run.bundle.records import (
    AccuracyInfo,
    BuildInfo,
    Count,
    EngineInfo,
    FileEntry,
    QuantizationInfo,
    Record,
    Sha256,
)
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.decoding.tree import TreeShape, parse_tree

SCHEMA_VERSION = 3

GraphName = Literal["target", "fuse", "draft"]
BackendName = Literal["onnx", "tensorrt", "tensorrt-rtx"]

_CACHED_INPUTS = ("input_ids", "position_ids", "tree_mask", "write_index", "logits_index")


def graph_tensor_names(graph: GraphName, layers: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(input names, output names) of a graph whose KV cache has `layers` layers, in signature order."""
    if graph == "fuse":
        return ("features",), ("hidden",)
    past = tuple(f"past_{kind}.{i}" for i in range(layers) for kind in ("key", "value"))
    present = tuple(name.replace("past_", "present_") for name in past)
    if graph == "target":
        return (*_CACHED_INPUTS, *past), ("logits", "features", *present)
    return ("input_ids", "hidden", *_CACHED_INPUTS[1:], *past), ("logits", "hidden_out", *present)


class TargetInfo(Record):
    """The model whose distribution is kept. `sha256` is its identity (see docs/format.md)."""

    name: str
    family: str
    source: str
    sha256: Sha256
    layers: Count
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab_size: Count


class HeadInfo(Record):
    """The draft head. `target_sha256` is the identity of the target it was built for.

    `feature_layers` index Transformers' `hidden_states`, ascending; L + 1 is what the final norm reads.
    `settings` are NAME=VALUE of what the head's own config.json does not say. `vocab_map` is null when draft
    ids are target ids.
    """

    algorithm: Literal["eagle1", "eagle3"]
    dialect: str
    source: str
    sha256: Sha256
    target_sha256: Sha256
    layers: Count
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    draft_vocab_size: Count
    feature_layers: tuple[Annotated[int, Field(ge=0)], ...]
    settings: tuple[str, ...] = ()
    vocab_map: FileEntry | None


class Limits(Record):
    """Sizes that the graphs and buffers were built for. Rows count cache positions."""

    max_seq_len: Count
    max_batch: Count
    prefill_chunk: Count
    max_tree_nodes: Count
    cache_rows: Count
    draft_cache_rows: Annotated[int, Field(ge=0)]


class TreeDefaults(Record):
    """The tree that is drafted unless the user asks for another. `nodes` counts the root.

    `parents` is the table of a static tree: one entry per node, -1 for the root, parents before children;
    children of one parent take the draft's ranks 0, 1, ... in order of appearance.
    """

    kind: Literal["dynamic", "static", "chain"]
    depth: Count
    top_k: Count
    nodes: Annotated[int, Field(ge=2)]
    parents: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _sensible(self) -> TreeDefaults:
        if (self.parents is not None) != (self.kind == "static"):
            raise ValueError(
                f"a {self.kind} tree must {'have' if self.kind == 'static' else 'not have'} parents"
            )
        candidates = self.top_k + (self.depth - 1) * self.top_k**2
        if self.kind == "dynamic" and self.nodes - 1 > candidates:
            raise ValueError(
                f"{self.nodes} nodes (root included) need {self.nodes - 1} candidates, "
                f"but depth {self.depth} and top_k {self.top_k} give {candidates}"
            )
        if self.kind == "chain" and (self.top_k, self.nodes) != (1, self.depth + 1):
            raise ValueError(f"a chain of depth {self.depth} has top_k 1 and {self.depth + 1} nodes")
        if self.parents is not None:
            self._check_parents(self.parents)
        return self

    def shape(self) -> TreeShape:
        """The tree as the decoder takes it."""
        if self.kind == "static":
            return parse_tree("static", parents=self.parents)
        return parse_tree(self.kind, self.depth, self.top_k, self.nodes)

    def _check_parents(self, parents: tuple[int, ...]) -> None:
        if len(parents) != self.nodes or parents[0] != -1:
            raise ValueError(f"parents must hold {self.nodes} entries, the first -1 (the root)")
        level = [0]
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parent of node {node} is {parent}; it must be an earlier node")
            level.append(level[parent] + 1)
        widest = max(parents.count(node) for node in range(self.nodes))
        if max(level) != self.depth or widest > self.top_k:
            raise ValueError(
                f"parents describe depth {max(level)} and up to {widest} children, "
                f"not depth {self.depth} and top_k {self.top_k}"
            )


class Artifact(Record):
    """One graph for one backend: `file` is what is opened, `files` lists it and its external data.

    `compute_capabilities` are the GPUs that an engine is for ("8.9"), ascending; empty for any. `engine` is
    null for an ONNX graph.
    """

    graph: GraphName
    backend: BackendName
    precision: str
    file: str
    files: tuple[FileEntry, ...]
    opset: int | None
    library_version: str
    compute_capabilities: tuple[Annotated[str, Field(pattern=r"^\d+\.\d$")], ...] = ()
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    engine: EngineInfo | None = None

    def runs_on(self, capability: str) -> bool:
        """Whether a GPU of this compute capability ("8.9") can run it; an ONNX graph runs on any."""
        if not self.compute_capabilities or capability in self.compute_capabilities:
            return True
        level = self.engine.hardware_compatibility if self.engine else "none"
        return level == "ampere_plus" and float(capability) >= 8.0

    def spec(self) -> GraphSpec:
        """The signature, as graphs have it."""
        return GraphSpec(self.graph, self.inputs, self.outputs)


class Manifest(Record):
    """manifest.json."""

    schema_version: Literal[3]
    name: str
    created: str
    tool_version: str
    target: TargetInfo
    head: HeadInfo | None
    limits: Limits
    tree: TreeDefaults | None
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...]
    tokenizer: tuple[FileEntry, ...]
    artifacts: tuple[Artifact, ...]
    build: BuildInfo
    quantization: QuantizationInfo | None = None
    accuracy: AccuracyInfo | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        problem = next(_contradictions(self), None)
        if problem:
            raise ValueError(problem)
        return self

    def files(self) -> list[FileEntry]:
        """Every file that the manifest vouches for."""
        vocab_map = self.head.vocab_map if self.head else None
        entries = [entry for artifact in self.artifacts for entry in artifact.files]
        scales = self.quantization.scales if self.quantization else None
        return [*entries, *self.tokenizer, *(entry for entry in (vocab_map, scales) if entry)]


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """What cannot be true at once, most telling first."""
    target, head, limits, tree = manifest.target, manifest.head, manifest.limits, manifest.tree
    yield from _limit_contradictions(limits, tree)
    if any(token >= target.vocab_size for token in manifest.stop_token_ids):
        yield f"stop_token_ids {list(manifest.stop_token_ids)} pass the vocabulary of {target.vocab_size}"
    if (head is None) != (tree is None):
        yield "head and tree must both be present or both be null"
    if tree and tree.nodes > limits.max_tree_nodes:
        yield f"a tree of {tree.nodes} nodes passes max_tree_nodes {limits.max_tree_nodes}"
    if head:
        yield from _head_contradictions(head, target)
    layers = {"target": target.layers, "draft": head.layers if head else 0, "fuse": 0}
    for artifact in manifest.artifacts:
        yield from _artifact_contradictions(artifact, layers[artifact.graph], has_head=head is not None)


def _limit_contradictions(limits: Limits, tree: TreeDefaults | None) -> Iterator[str]:
    """Behind the longest sequence a cache has room for a prefill chunk, and for the tree of a round."""
    behind = max(limits.prefill_chunk, tree.shape().cache_rows if tree else 1)
    needed = limits.max_seq_len + behind
    caches = {"cache_rows": limits.cache_rows}
    if tree:
        caches["draft_cache_rows"] = limits.draft_cache_rows
    for name, rows in caches.items():
        if rows < needed:
            yield (
                f"max_seq_len {limits.max_seq_len} and {behind} rows behind it for a prefill chunk or tree "
                f"need {needed} rows, but {name} is {rows}"
            )


def _head_contradictions(head: HeadInfo, target: TargetInfo) -> Iterator[str]:
    features = head.feature_layers
    if not features or list(features) != sorted(set(features)) or features[-1] > target.layers + 1:
        yield f"feature_layers {list(features)} must ascend within 0..{target.layers + 1}"
    if head.vocab_map is None and head.draft_vocab_size != target.vocab_size:
        yield f"draft vocabulary {head.draft_vocab_size} of {target.vocab_size} needs a vocab_map"


def _artifact_contradictions(artifact: Artifact, layers: int, *, has_head: bool) -> Iterator[str]:
    if artifact.graph != "target" and not has_head:
        yield f"a {artifact.graph} graph without a head"
    if (artifact.engine is None) != (artifact.backend == "onnx"):
        yield f"{artifact.graph} graph for {artifact.backend}: engine is null for onnx, and only for onnx"
    if artifact.engine is not None:
        yield from _engine_contradictions(artifact, artifact.engine)
    if artifact.file not in {entry.path for entry in artifact.files}:
        yield f"{artifact.file!r} of the {artifact.graph} graph is not among its files"
    found = tuple(info.name for info in artifact.inputs), tuple(info.name for info in artifact.outputs)
    expected = graph_tensor_names(artifact.graph, layers)
    for side, have, want in zip(("inputs", "outputs"), found, expected, strict=True):
        if set(have) != set(want) or len(have) != len(want):
            odd = sorted(set(have) ^ set(want)) or sorted(have)
            yield f"{side} of the {artifact.graph} graph differ from the contract: {odd}"


def _engine_contradictions(artifact: Artifact, engine: EngineInfo) -> Iterator[str]:
    """An engine knows its sizes by profile, and runs on the GPUs it names."""
    where = f"{artifact.graph} engine"
    named = [tuple(int(part) for part in text.split(".")) for text in artifact.compute_capabilities]
    if named != sorted(set(named)):
        yield f"{where}: compute_capabilities {list(artifact.compute_capabilities)} must ascend"
    names = [profile.name for profile in engine.profiles]
    if len(set(names)) < len(names):
        yield f"{where}: two profiles have one name among {names}"
    tensors = (*artifact.inputs, *artifact.outputs)
    dynamic = {size for tensor in tensors for size in tensor.shape if isinstance(size, str)}
    for profile in engine.profiles:
        if odd := sorted(dynamic ^ set(profile.axes)):
            yield (
                f"{where}: profile {profile.name!r} must give exactly the dynamic axes of the graph, "
                f"{', '.join(sorted(dynamic))}; it differs in {', '.join(odd)}"
            )
