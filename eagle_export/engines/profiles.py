"""Shape profiles: for which sizes of B, T, R and KV an engine gets kernels, and for which they are tuned.

An engine holds its weights once and a set of kernels per profile, so several profiles in one engine are far
smaller than several engines. What each of them buys:

prefill   a chunk of the prompt: many rows, one row of logits. Without it prompts run in kernels tuned for
          the few rows of a tree, and with scratch memory for the logits of one.
verify    a tree of nodes, with logits for each of them.
plain     one row (two in fp8, where a lone row is joined by another). Its fixed size lets the compiler take a
          decode kernel for attention (a matrix-vector product) where the others have the prefill kernel;
          plain decoding is what a speedup is measured against. Beside a head not in fp8, where other kernels
          would give other answers (EngineOptions.profile_names).
draft     the draft's levels and its prime: few rows. The draft graph's counterpart of verify.
fuse      the only one of the fuse graph, which is a single product.

Each one costs about 0.3 MB a layer in 16 bit and 0.55 MB in fp8 (of SmolLM2's target, 3% and 9%; of a model
of a billion parameters, a few thousandths) and its share of the time to compile. A profile that is not wanted
costs nothing but the tuning: the ones that are left cover its sizes too.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_export.engines.request import PROFILE_NAMES
from eagle_run.bundle.manifest import Limits, TreeDefaults
from eagle_run.bundle.records import Axis, AxisRange, EngineProfile
from eagle_run.errors import UsageError

_TUNED_ROWS = 8  # `eagle-run --tree auto` times the fuse graph with up to this many rows


def choose_profiles(
    graph: str,
    limits: Limits,
    tree: TreeDefaults | None,
    names: Sequence[str] = (),
    *,
    precision: str = "fp16",
) -> tuple[EngineProfile, ...]:
    """The profiles of one graph ("target", "draft" or "fuse"), in the engine's order.

    limits, tree: of the bundle; `tree` is None without a head. names: the profiles wanted, empty for all that
    the graph can use; names of other graphs are skipped. Together the profiles hold every shape that the
    runtime binds within the limits, except for trees with a level wider than max_tree_nodes.

    Raises UsageError for unknown names, and where only "plain" is left to serve prompts.
    """
    unknown = [name for name in names if name not in PROFILE_NAMES]
    if unknown:
        raise UsageError(
            f"profiles should be of {', '.join(PROFILE_NAMES)}, found {', '.join(unknown)}",
            hint="leave them out to have all that a graph can use",
            parameters=["profiles"],
        )
    if graph == "fuse":
        return (_fuse(limits, tree),)
    usable = {"target": ("prefill", "verify", "plain"), "draft": ("prefill", "draft")}[graph]
    if tree is None:
        usable = ("prefill", "plain")
    chosen = tuple(name for name in usable if name in (names or usable))
    if chosen == ("plain",):
        raise UsageError(
            "the profile plain holds one row only, so it cannot serve prompts",
            hint="add prefill or verify to the profiles",
            parameters=["profiles"],
        )
    alone = 2 if precision == "fp8" else 1  # rows of plain decoding: see ModelRunner
    return _cached(graph, limits, tree, chosen or usable[-1:], alone)


def _cached(
    graph: str, limits: Limits, tree: TreeDefaults | None, chosen: Sequence[str], alone: int
) -> tuple[EngineProfile, ...]:
    """Profiles of a graph with a KV cache."""
    from eagle_run.engine.prefill import kv_bucket  # it loads torch

    rows = limits.cache_rows if graph == "target" else limits.draft_cache_rows
    shared: dict[Axis, AxisRange] = {
        "B": _range(1, limits.max_batch),
        "KV": _range(kv_bucket(limits.max_seq_len // 2, rows), rows),
    }
    chunk, tuned, nodes = limits.prefill_chunk, *_tree_rows(graph, limits, tree)
    few = "verify" if graph == "target" else "draft"
    prefill: dict[Axis, AxisRange] = {"T": _range(chunk, chunk), "R": _range(1, 1)}
    if few not in chosen and tree is not None:  # then prefill serves trees as well
        prefill = {"T": _range(chunk, max(chunk, nodes)), "R": _range(1, nodes)}
    made: dict[str, dict[Axis, AxisRange]] = {
        "prefill": prefill,
        few: {
            "T": _range(tuned, nodes if "prefill" in chosen else max(chunk, nodes)),
            "R": _range(tuned, nodes),
        },
        "plain": {axis: AxisRange(min=alone, opt=alone, max=alone) for axis in ("T", "R")},
    }
    return tuple(EngineProfile(name=name, axes={**shared, **made[name]}) for name in chosen)


def _tree_rows(graph: str, limits: Limits, tree: TreeDefaults | None) -> tuple[int, int]:
    """(usual rows of a forward of a round, most rows that a user's tree may give one)."""
    if tree is None:
        return 1, 1
    shape = tree.shape()
    if graph == "target":
        return shape.nodes, limits.max_tree_nodes
    widths = [level.width for level in shape.levels[1:]]
    prime = shape.depth + 1
    usual = max(widths, default=prime)
    return usual, max(limits.max_tree_nodes, prime, usual)


def _fuse(limits: Limits, tree: TreeDefaults | None) -> EngineProfile:
    """Rows of a prompt's chunk, or the pairs that a round accepted."""
    prime = 1 if tree is None else tree.depth + 1
    most = max(limits.prefill_chunk, limits.max_tree_nodes, prime, _TUNED_ROWS)
    return EngineProfile(name="fuse", axes={"B": _range(1, limits.max_batch), "T": _range(prime, most)})


def _range(tuned: int, most: int) -> AxisRange:
    """From one (the cheapest to allow) to `most`."""
    return AxisRange(min=1, opt=tuned, max=most)
