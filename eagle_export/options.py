"""What a build is asked for, and how that joins with a recipe's defaults. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_run.bundle import TreeDefaults
from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    from eagle_export.recipe import BuildLimits
    from eagle_run.tree import TreeShape

PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
TREE_KINDS = ("dynamic", "static", "chain")
_ROW_STEP = 64  # cache rows are rounded up to whole steps


@dataclass(frozen=True)
class BuildOptions:
    """The options of `build` and `export`; None means the recipe's value.

    target: recipe, folder or hub id. head: eagle1, eagle3, folder, hub id or "none".
    head_layer_ids: indices into Transformers' `hidden_states` that override the head's own.
    Sizes count tokens (max_seq_len, prefill_chunk), sequences (max_batch) and nodes with the root.
    """

    target: str
    head: str = "eagle3"
    head_layer_ids: tuple[int, ...] | None = None
    out: Path | None = None
    precision: str = "fp32"
    backend: str = "onnxruntime"
    max_seq_len: int | None = None
    max_batch: int | None = None
    prefill_chunk: int | None = None
    max_tree_nodes: int | None = None
    tree: str | None = None
    depth: int | None = None
    top_k: int | None = None
    nodes: int | None = None
    force: bool = False

    def check(self) -> None:
        """Raises for what no target could make right: so that a wrong command line costs no waiting."""
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision should be one of {', '.join(PRECISIONS)}, found {self.precision!r}")
        if self.precision == "fp8":
            raise EagleError(
                "precision fp8 is not in this version yet", hint="use --precision fp32, fp16 or bf16"
            )
        if self.backend not in BACKENDS:
            raise UsageError(f"backend should be one of {', '.join(BACKENDS)}, found {self.backend!r}")
        if self.backend != "onnxruntime":
            raise EagleError(
                f"compiling for {self.backend} is not in this version yet",
                hint="use --backend onnxruntime; the graphs it writes are what TensorRT will read",
            )
        for name in ("max_seq_len", "max_batch", "prefill_chunk", "max_tree_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} should be at least 1, found {value}")
        if self.head == "none":
            self._check_headless()

    def _check_headless(self) -> None:
        """An option of the draft means nothing where there is none."""
        for name, flag in (("tree", "tree"), ("depth", "depth"), ("top_k", "branch"), ("nodes", "nodes")):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"--{flag} describes a draft tree, but --head none has no draft",
                    hint="leave it out, or name a head",
                )
        if self.head_layer_ids is not None:
            raise UsageError(
                "--head-layer-ids says what a head reads, but --head none has no head",
                hint="leave it out, or name a head",
            )


def choose_limits(options: BuildOptions, defaults: BuildLimits) -> BuildLimits:
    """The recipe's sizes with those given in their place; a chunk longer than the context is cut to it."""
    names = ("max_seq_len", "max_batch", "prefill_chunk", "max_tree_nodes")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    limits = defaults.model_copy(update=given)
    return limits.model_copy(update={"prefill_chunk": min(limits.prefill_chunk, limits.max_seq_len)})


def choose_tree(options: BuildOptions, default: TreeDefaults, max_nodes: int) -> TreeDefaults:
    """The tree of the options, the recipe's values standing in for what is not given.

    A static tree is the best one of this depth, top_k and size for an average head. Raises UsageError for a
    tree that makes no sense or has more nodes than `max_nodes`; the recipe's own dynamic tree shrinks to it.
    """
    from eagle_run.tree import best_static, parse_tree

    given = (options.tree, options.depth, options.top_k, options.nodes)
    kind = options.tree or default.kind
    depth = options.depth if options.depth is not None else default.depth
    top_k = options.top_k if options.top_k is not None else default.top_k
    nodes = options.nodes if options.nodes is not None else default.nodes
    if given == (None, None, None, None):
        if default.kind == "dynamic":  # nobody asked for this size: it may shrink
            nodes = max(2, min(default.nodes, max_nodes))
        shape = parse_tree(default.kind, depth, top_k, nodes, default.parents)
    elif kind == "chain":
        shape = parse_tree("chain", depth, options.top_k, options.nodes)
    elif kind == "static":
        shape = best_static(depth, top_k, nodes)
    else:
        shape = parse_tree(kind, depth, top_k, nodes)
    if shape.nodes > max_nodes:
        raise UsageError(
            f"a tree of {shape.nodes} nodes (root included) is larger than max_tree_nodes, {max_nodes}",
            hint=f"ask for a smaller tree, or give --max-tree-nodes {shape.nodes}",
        )
    return tree_defaults(shape)


def tree_defaults(shape: TreeShape) -> TreeDefaults:
    """A shape as the manifest writes it."""
    return TreeDefaults(
        kind=shape.kind,  # type: ignore[arg-type]
        depth=shape.depth,
        top_k=shape.top_k,
        nodes=shape.nodes,
        parents=shape.parents,
    )


def cache_rows_for(limits: BuildLimits, tree: TreeDefaults | None) -> int:
    """S: rows for the longest sequence and, behind it, for the widest thing that one forward may write."""
    from eagle_run.tree import parse_tree

    behind = max(limits.prefill_chunk, limits.max_tree_nodes)
    if tree is not None:
        shape = parse_tree(tree.kind, tree.depth, tree.top_k, tree.nodes, tree.parents)
        behind = max(behind, shape.cache_rows)
    rows = limits.max_seq_len + behind
    return -(-rows // _ROW_STEP) * _ROW_STEP
