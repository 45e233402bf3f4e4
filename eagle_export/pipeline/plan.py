"""What a build will do: target and head found, options joined with the recipe, all of it checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export.checkpoints import weights
from eagle_export.checkpoints.fp8_scales import Scales
from eagle_export.checkpoints.unchanged import Unchanged
from eagle_export.inspection.describe import size
from eagle_export.output_folder import check_links, check_output_folder, check_writable, free_space
from eagle_export.pipeline.decoding_memory import asked_limits, check_limits, weigh_decoding
from eagle_export.pipeline.options import (
    BuildOptions,
    EngineOptions,
    Fp8Options,
    cache_rows_for,
    choose_limits,
    choose_tree,
)
from eagle_export.pipeline.partial import partial_bytes
from eagle_export.reference import recipe as recipes
from eagle_run.bundle.manifest import Limits, TreeDefaults
from eagle_run.datasets import read_questions

if TYPE_CHECKING:
    from eagle_export.heads.load import LoadedHead
    from eagle_export.pipeline.estimate import Estimate

_LONGEST_NAME = 128  # file systems allow 255 bytes, of which unfinished folders need some more


@dataclass(frozen=True)
class Plan:
    """Everything that is decided, and checked, before the first weight is read."""

    target: recipes.ResolvedTarget
    head: recipes.ResolvedHead | None
    loaded: LoadedHead | None
    config: Any  # the target's Transformers config
    limits: Limits
    tree: TreeDefaults | None
    precision: str
    dtype: str  # of all that is not a quantised product
    engine: EngineOptions
    fp8: Fp8Options
    measure: bool
    link_weights: bool
    unchanged: Unchanged  # target and head since they were found
    out: Path
    asked: Sequence[str] = ()  # the limits that the user named


def make_plan(options: BuildOptions) -> Plan:
    """Finds target and head and checks that they fit each other and the graphs. Traces nothing.

    What contradicts itself is refused before any weights are fetched or dequantised.
    """
    out = check_names(options)
    from eagle_export.reference.modules import load_config, load_fitting_head

    target = recipes.resolve_target(options.target)
    head = None if options.head == "none" else recipes.resolve_head(options.head, target)
    folders = [target.folder] + ([head.folder] if head else [])
    unchanged = Unchanged(target.file, *folders, linked=options.link_weights)
    limits, tree = _sizes(options, target.recipe)
    config = load_config(target, limits.max_seq_len)
    loaded = None
    if head is not None:
        loaded = load_fitting_head(head, config, options.head_settings)
    if options.link_weights:
        check_links((file for folder in folders for file in weights.model_files(folder)), out.parent)
    rows = cache_rows_for(limits, tree)
    return Plan(
        target=target,
        head=head,
        loaded=loaded,
        config=config,
        limits=Limits(**limits.model_dump(), cache_rows=rows, draft_cache_rows=0 if loaded is None else rows),
        tree=tree,
        precision=options.precision,
        dtype=options.dtype,
        engine=options.engine,
        fp8=options.fp8,
        measure=options.measure,
        link_weights=options.link_weights,
        unchanged=unchanged,
        out=out,
        asked=asked_limits(options),
    )


def check_names(options: BuildOptions) -> Path:
    """What can be judged before torch is loaded: that target and head mean something, sizes and files.

    Returns the folder of the bundle. Raises UsageError and EagleError.
    """
    named, _ = recipes.find_target(options.target)
    out = options.out or _default_folder(options, named)
    check_output_folder(out, force=options.force)
    _sizes(options, named)
    if options.fp8.scales is not None:
        Scales.load(options.fp8.scales)
    if options.fp8.prompts is not None:
        read_questions(options.fp8.prompts)
    return out


def _sizes(options: BuildOptions, recipe: recipes.Recipe) -> tuple[recipes.BuildLimits, TreeDefaults | None]:
    """Limits and tree of the options over a recipe's. Raises UsageError for what contradicts itself."""
    limits = choose_limits(options, recipe.limits)
    if options.head == "none":
        return limits, None
    recipes.find_head(options.head, recipe)
    return limits, choose_tree(options, recipe.tree, limits.max_tree_nodes)


def _default_folder(options: BuildOptions, recipe: recipes.Recipe) -> Path:
    kind = "plain" if options.head == "none" else options.head
    if kind not in ("plain", "eagle1", "eagle3"):
        kind = Path(str(recipes.find_head(kind, recipe))).name
    name = f"{recipe.name}-{kind}"
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 13]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return Path("bundles") / name


def estimate_plan(plan: Plan) -> Estimate:
    """What it will take: from the headers of the weight files, which are not read."""
    from eagle_export.pipeline.estimate import estimate
    from eagle_export.pipeline.sizes import weigh_checkpoints

    graphs = weigh_checkpoints(
        plan.target.folder,
        None if plan.head is None else plan.head.folder,
        plan.precision,
        keep=plan.fp8.keep,
        lm_head=plan.fp8.lm_head,
        base=plan.dtype,
    )
    profiles = None
    if plan.engine.compiles:
        from eagle_export.engines.profiles import choose_profiles

        names = plan.engine.profile_names(plan.precision, has_head=plan.loaded is not None)
        profiles = {
            graph.name: len(
                choose_profiles(graph.name, plan.limits, plan.tree, names, precision=plan.precision)
            )
            for graph in graphs
        }
    needed = estimate(
        graphs,
        plan.precision,
        calibrates=plan.precision == "fp8" and plan.fp8.scales is None,
        measures=plan.measure and plan.precision != "fp32",
        links=plan.link_weights,
        profiles=profiles,
    )
    spec = None if plan.loaded is None else plan.loaded.spec
    decoding = weigh_decoding(plan.config, spec, plan.limits, plan.tree, plan.dtype)
    return replace(needed, decoding=decoding, max_batch=plan.limits.max_batch)


def fit(plan: Plan) -> tuple[Plan, Estimate, tuple[str, ...]]:
    """The plan as this machine can do it, what it takes, and what to tell the user.

    Without enough memory to compare a target with its float32 self, that is left out. Raises EagleError when
    the folder cannot be written, and when the disk is too small, or memory by far, for the build or for the
    limits that were asked for; what an interrupted run left counts as room.
    """
    from eagle_export.pipeline.estimate import memory_here

    check_writable(plan.out)  # weights are identified before anything is written: that may take minutes
    memory, needed = memory_here(), estimate_plan(plan)
    notes: list[str] = []
    if needed.decoding is not None:
        here = (memory.available, memory.total)
        notes += check_limits(plan.limits, needed.decoding, here, plan.asked, compiles=plan.engine.compiles)
    if (measuring := needed.steps.get("measure")) and measuring.memory_bytes > memory.total:
        notes.append(
            f"note: the accuracy is not measured: that takes about {size(measuring.memory_bytes)} of memory, "
            f"there are {size(memory.total)} in all"
        )
        plan = replace(plan, measure=False)
        needed = estimate_plan(plan)
    notes += needed.check(memory, free_space(plan.out) + partial_bytes(plan.out), plan.out)
    return plan, needed, tuple(notes)
