"""What a build is asked for, and how that joins with a recipe's defaults. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_export.engines.request import PROFILE_NAMES as PROFILES
from eagle_export.heads.settings import UNSAID, HeadSettings, parse_settings
from eagle_run.bundle.manifest import TreeDefaults
from eagle_run.errors import UsageError

if TYPE_CHECKING:
    from eagle_export.reference.recipe import BuildLimits
    from eagle_run.decoding.tree import TreeShape

PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
TREE_KINDS = ("dynamic", "static", "chain")
_ROW_STEP = 64  # cache rows are rounded up to whole steps


@dataclass(frozen=True)
class EngineOptions:
    """What to compile for, shared by `build` and `compile`. None and empty mean the library's or our default.

    target_arch: GPU architectures such as "sm89" (TensorRT-RTX only: TensorRT compiles for the GPU it runs
    on). profiles: names of optimization profiles. workspace: MiB that a kernel may take. optimization_level:
    0 to 5. hardware_compatibility, version_compatible, timing_cache: TensorRT only.
    """

    backend: str = "onnxruntime"
    target_arch: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    workspace: int | None = None
    optimization_level: int | None = None
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    timing_cache: Path | None = None

    @property
    def compiles(self) -> bool:
        return self.backend != "onnxruntime"

    def profile_names(self, precision: str, *, has_head: bool) -> tuple[str, ...]:
        """The profiles asked for; empty for all that a graph can use.

        Beside a head, FP8 has no kernels of its own for plain decoding unless asked for: kernels that sum in
        another order differ in a last bit, and rounding to FP8 makes that grow until plain decoding and a
        tree answer differently (docs/log.md).
        """
        if self.profiles or precision != "fp8" or not has_head:
            return self.profiles
        return tuple(name for name in PROFILES if name != "plain")

    def check(self, precision: str) -> None:
        """Raises for a backend that cannot be, and for what this backend or these GPUs cannot do."""
        if self.backend not in BACKENDS:
            raise UsageError(
                f"backend should be one of {', '.join(BACKENDS)}, found {self.backend!r}",
                parameters=["backend"],
            )
        if not self.compiles:
            self._check_unused()
            return
        if unknown := [name for name in self.profiles if name not in PROFILES]:
            raise UsageError(
                f"profiles should be of {', '.join(PROFILES)}, found {', '.join(unknown)}",
                hint="leave them out to have all that a graph can use",
                parameters=["profiles"],
            )
        from eagle_export.engines.architectures import check_architectures

        check_architectures(self.backend, precision, self.target_arch)
        tensorrt_only = [name for name in _TENSORRT_ONLY if name in self._changed()]
        if self.backend == "tensorrt-rtx" and tensorrt_only:
            raise UsageError(
                f"{', '.join(tensorrt_only)} is for TensorRT; a TensorRT-RTX engine is finished on the GPU "
                "it runs on",
                hint="leave it out; the architectures say which GPUs the engine is for",
                parameters=[*tensorrt_only, "target_arch"],
            )

    def _check_unused(self) -> None:
        if unused := [name for name in self._changed() if name != "backend"]:
            raise UsageError(
                f"{', '.join(unused)} is for engines, but the backend onnxruntime compiles none",
                hint="leave it out, or choose tensorrt-rtx or tensorrt",
                parameters=[*unused, "backend"],
            )

    def _changed(self) -> list[str]:
        """Names of the options that are not what they are by default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(EngineOptions(), f.name)]


_TENSORRT_ONLY = ("hardware_compatibility", "version_compatible", "timing_cache")


@dataclass(frozen=True)
class Fp8Options:
    """How FP8 is made. keep: patterns of linear layers that stay in 16 bit. lm_head, fuse: quantise that too.

    base: type of everything that is not a quantised product. scales: a file of scales from an earlier build.
    prompts: questions to calibrate on, in place of our own.
    """

    keep: tuple[str, ...] = ()
    lm_head: bool = False
    fuse: bool = False
    base: str = "fp16"
    scales: Path | None = None
    prompts: Path | None = None

    def check(self, precision: str) -> None:
        """Raises UsageError for options of FP8 where there is none, and for those that contradict."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(Fp8Options(), f.name)]
        if precision != "fp8" and changed:
            raise UsageError(
                f"{', '.join(changed)} is for FP8, but the precision is {precision}",
                hint="build in fp8, or leave it out",
                parameters=[*changed, "precision"],
            )
        if self.scales is not None and self.prompts is not None:
            raise UsageError(
                "scales and prompts to calibrate on contradict: the file of scales replaces a calibration",
                hint="give one of them",
                parameters=["scales", "prompts"],
            )


@dataclass(frozen=True)
class BuildOptions:
    """The options of `build` and `export`; None means the recipe's value.

    target: recipe, folder or hub id. head: eagle1, eagle3, folder, hub id or "none".
    head_layer_ids: indices into Transformers' `hidden_states` that override the head's own.
    head_set: NAME=VALUE, other things that override what the head's config.json says.
    Sizes count tokens (max_seq_len, prefill_chunk), sequences (max_batch) and nodes with the root.
    measure: compare the target with its float32 self, for a precision below that.
    link_weights: leave weights in the checkpoint's own files where they are as the graph wants them.
    force: replace a bundle that is there. fresh: do not go on where an interrupted run ended.
    """

    target: str
    head: str = "eagle3"
    head_layer_ids: tuple[int, ...] | None = None
    head_set: tuple[str, ...] = ()
    out: Path | None = None
    precision: str = "fp32"
    engine: EngineOptions = EngineOptions()
    fp8: Fp8Options = Fp8Options()
    max_seq_len: int | None = None
    max_batch: int | None = None
    prefill_chunk: int | None = None
    max_tree_nodes: int | None = None
    tree: str | None = None
    depth: int | None = None
    top_k: int | None = None
    nodes: int | None = None
    measure: bool = True
    link_weights: bool = False
    force: bool = False
    fresh: bool = False

    @property
    def head_settings(self) -> HeadSettings:
        """What the user says of the head. Raises UsageError for what is no setting."""
        return replace(parse_settings(self.head_set), layer_ids=self.head_layer_ids)

    @property
    def dtype(self) -> str:
        """Of all that is not a quantised product: the precision itself, or the base of FP8."""
        return self.fp8.base if self.precision == "fp8" else self.precision

    def check(self) -> None:
        """Raises for what no target could make right: so that a wrong command line costs no waiting."""
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision should be one of {', '.join(PRECISIONS)}, found {self.precision!r}",
                parameters=["precision"],
            )
        self.fp8.check(self.precision)
        self.engine.check(self.precision)
        settings_given = self.head_settings != UNSAID
        for name in ("max_seq_len", "max_batch", "prefill_chunk", "max_tree_nodes"):
            value = getattr(self, name)
            least = 2 if name == "max_seq_len" else 1  # a token to read, and one to answer
            if value is not None and value < least:
                raise UsageError(f"{name} should be at least {least}, found {value}", parameters=[name])
        if self.head == "none":
            self._check_headless(settings_given)

    def _check_headless(self, settings_given: bool) -> None:
        """An option of the draft means nothing where there is none."""
        if tree := [name for name in ("tree", "depth", "top_k", "nodes") if getattr(self, name) is not None]:
            raise UsageError(
                f"{', '.join(tree)} describes a draft tree, but without a head there is no draft",
                hint="leave it out, or name a head",
                parameters=[*tree, "head"],
            )
        if settings_given:
            raise UsageError(
                "layer ids and settings of a head say how it is read, but there is no head",
                hint="leave them out, or name a head",
                parameters=["head_layer_ids", "head_set", "head"],
            )


def choose_limits(options: BuildOptions, defaults: BuildLimits) -> BuildLimits:
    """The recipe's sizes with those given in their place; a chunk longer than the context is cut to it."""
    names = ("max_seq_len", "max_batch", "prefill_chunk", "max_tree_nodes")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    limits = defaults.model_copy(update=chosen)
    return limits.model_copy(update={"prefill_chunk": min(limits.prefill_chunk, limits.max_seq_len)})


def choose_tree(options: BuildOptions, default: TreeDefaults, max_nodes: int) -> TreeDefaults:
    """The tree of the options, the recipe's values standing in for what is not given.

    A kind alone takes the sizes given beside it; a static tree is then the best one of this depth, top_k and
    size for an average head. Raises UsageError for a tree that makes no sense or has more nodes than
    `max_nodes`; the recipe's own dynamic tree shrinks to it.
    """
    from eagle_run.decoding.tree import best_static, parse_tree

    asked = (options.tree, options.depth, options.top_k, options.nodes)
    kind = options.tree or default.kind
    depth = options.depth if options.depth is not None else default.depth
    top_k = options.top_k if options.top_k is not None else default.top_k
    nodes = options.nodes if options.nodes is not None else default.nodes
    if options.tree is not None and options.tree not in TREE_KINDS:
        shape = _specified_tree(options)
    elif asked == (None, None, None, None):
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
            hint=f"ask for a smaller tree, or build for {shape.nodes} nodes",
            parameters=["nodes", "max_tree_nodes"],
        )
    return tree_defaults(shape)


def _specified_tree(options: BuildOptions) -> TreeShape:
    """The tree of a whole spec, or of a file. Raises UsageError for sizes beside it, and for none at all."""
    from eagle_run.decoding.tree_spec import parse_tree_spec

    if sizes := [name for name in ("depth", "top_k", "nodes") if getattr(options, name) is not None]:
        raise UsageError(
            f"the tree {options.tree} is complete; it takes no {', '.join(sizes)} beside it",
            hint="leave the sizes out",
            parameters=sizes,
        )
    shape = parse_tree_spec(str(options.tree))
    if shape.kind == "plain":
        raise UsageError(
            "a bundle's own tree drafts something, and plain decoding needs none",
            hint="leave it out; any bundle decodes plainly when asked to",
            parameters=["tree"],
        )
    return shape


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
    from eagle_run.decoding.tree import parse_tree

    behind = max(limits.prefill_chunk, limits.max_tree_nodes)
    if tree is not None:
        shape = parse_tree(tree.kind, tree.depth, tree.top_k, tree.nodes, tree.parents)
        behind = max(behind, shape.cache_rows)
    rows = limits.max_seq_len + behind
    return -(-rows // _ROW_STEP) * _ROW_STEP
