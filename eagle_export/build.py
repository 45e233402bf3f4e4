"""`eagle-export build`: from a target and its head to a bundle, as a list of steps."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export import recipe as recipes
from eagle_export import weights
from eagle_export.options import BuildOptions, cache_rows_for, choose_limits, choose_tree
from eagle_export.progress import Report, peak_memory_bytes
from eagle_export.writer import BundleWriter, check_place, require_space
from eagle_run.bundle import Bundle, HeadInfo, Limits, TargetInfo, TreeDefaults

if TYPE_CHECKING:
    from eagle_export.heads import LoadedHead
    from eagle_export.reference import Modules
    from eagle_run.backends.base import GraphSpec

_VERSIONS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu")


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
    out: Path


@dataclass(frozen=True)
class Built:
    """What a build made, and what it took: seconds by step, the most resident memory of the process."""

    bundle: Bundle
    seconds: dict[str, float]
    total_seconds: float
    peak_memory_bytes: int


def build(options: BuildOptions, report: Report) -> Built:
    """Builds a bundle at `options.out` (default bundles/<recipe>-<head>).

    Raises UsageError for options that make no sense and EagleError for everything else that can be wrong; an
    error or Ctrl-C leaves nothing behind, and an existing bundle stays as it was.
    """
    options.check()
    with report.step("find the weights"):
        plan = make_plan(options)
    if plan.precision == "bf16":
        report.note("note: ONNX Runtime computes bf16 on GPUs only; on a CPU this bundle will not load")
    with BundleWriter(plan.out, force=options.force) as writer:
        with report.step("write vocabulary map and tokenizer"):  # first: a tokenizer may be no good
            writer.copy_tokenizer(plan.target.folder)
            head = _head_info(plan, writer)
        with report.step("load the weights"):
            modules = _load(plan)
        specs = export_graphs(modules, plan.limits, writer.file("onnx/target.onnx").parent, report)
        with report.step("check the graphs"):
            check_graphs(writer.folder / "onnx", specs)
            _add_graphs(writer, specs, plan.precision)
        with report.step("write the manifest"):
            bundle = writer.finish(
                target=_target_info(plan),
                head=head,
                limits=plan.limits,
                tree=plan.tree,
                stop_token_ids=_stop_tokens(plan, writer.folder),
                build={
                    "seconds": round(report.total_seconds(), 2),
                    "peak_memory_bytes": peak_memory_bytes(),
                    "versions": library_versions(),
                },
            )
    return Built(bundle, dict(report.seconds), report.total_seconds(), peak_memory_bytes())


def export_only(options: BuildOptions, report: Report) -> Path:
    """Writes the graphs alone (and the head's vocabulary map) into the new or empty folder `options.out`."""
    options.check()
    with report.step("find the weights"):
        plan = make_plan(options)
    with BundleWriter(plan.out, force=False) as writer:
        with report.step("load the weights"):
            modules = _load(plan)
        specs = export_graphs(modules, plan.limits, writer.folder, report)
        with report.step("check the graphs"):
            check_graphs(writer.folder, specs)
        if plan.loaded is not None and not _same_vocabulary(plan.loaded):
            writer.write_vocab_map(plan.loaded.draft_to_target)
        if plan.out.exists():
            plan.out.rmdir()
        writer.folder.rename(plan.out)
    return plan.out


def make_plan(options: BuildOptions) -> Plan:
    """Finds target and head and checks that they fit each other, the graphs and the disk. Traces nothing.

    What contradicts itself is refused before any weights are fetched or dequantised.
    """
    from eagle_export.reference import load_config, load_fitting_head

    named, _ = recipes.find_target(options.target)
    out = options.out or _default_place(options, named)
    check_place(out, force=options.force)
    _sizes(options, named)
    target = recipes.resolve_target(options.target)
    head = None if options.head == "none" else recipes.resolve_head(options.head, target)
    limits, tree = _sizes(options, target.recipe)
    config = load_config(target, limits.max_seq_len)
    loaded = None
    if head is not None:
        loaded = load_fitting_head(head, config, layer_ids=options.head_layer_ids)
    require_space(out, _bytes_needed(target.folder, None if head is None else head.folder, options.precision))
    rows = cache_rows_for(limits, tree)
    return Plan(
        target=target,
        head=head,
        loaded=loaded,
        config=config,
        limits=Limits(**limits.model_dump(), cache_rows=rows, draft_cache_rows=0 if loaded is None else rows),
        tree=tree,
        precision=options.precision,
        out=out,
    )


def _sizes(options: BuildOptions, recipe: recipes.Recipe) -> tuple[recipes.BuildLimits, TreeDefaults | None]:
    """Limits and tree of the options over a recipe's. Raises UsageError for what contradicts itself."""
    limits = choose_limits(options, recipe.limits)
    if options.head == "none":
        return limits, None
    recipes.find_head(options.head, recipe)
    return limits, choose_tree(options, recipe.tree, limits.max_tree_nodes)


def _default_place(options: BuildOptions, recipe: recipes.Recipe) -> Path:
    kind = "plain" if options.head == "none" else options.head
    if kind not in ("plain", "eagle1", "eagle3"):
        kind = Path(str(recipes.find_head(kind, recipe))).name
    return Path("bundles") / f"{recipe.name}-{kind}"


def export_graphs(modules: Modules, limits: Limits, folder: Path, report: Report) -> dict[str, GraphSpec]:
    """Traces each module into `folder`/<graph>.onnx; the signatures by graph name."""
    from eagle_export.graphs.draft import export_draft
    from eagle_export.graphs.fuse import export_fuse
    from eagle_export.graphs.target import export_target

    specs: dict[str, GraphSpec] = {}
    with report.step("export target"):
        specs["target"] = export_target(modules.target, folder / "target.onnx", cache_rows=limits.cache_rows)
    if modules.fuse is not None:
        with report.step("export fuse"):
            specs["fuse"] = export_fuse(modules.fuse, folder / "fuse.onnx")
    if modules.draft is not None:
        with report.step("export draft"):
            specs["draft"] = export_draft(
                modules.draft, folder / "draft.onnx", cache_rows=limits.draft_cache_rows
            )
    return specs


def check_graphs(folder: Path, specs: dict[str, GraphSpec]) -> None:
    """Raises EagleError unless every graph passes ONNX's full check with standard operators only."""
    from eagle_export.graphs.check import check_file

    for name, spec in specs.items():
        check_file(folder / f"{name}.onnx", spec)


def library_versions() -> dict[str, str]:
    """Versions of what took part in a build. ONNX Runtime goes by one of two names, so some are absent."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _load(plan: Plan) -> Modules:
    from eagle_export.reference import DTYPES, load_modules

    return load_modules(plan.target, plan.loaded, DTYPES[plan.precision])


def _add_graphs(writer: BundleWriter, specs: dict[str, GraphSpec], precision: str) -> None:
    from eagle_export.graphs.ops import OPSET

    for name, spec in specs.items():
        data = f"onnx/{name}.onnx.data"
        writer.add_artifact(
            name,  # type: ignore[arg-type]
            "onnx",
            precision,
            f"onnx/{name}.onnx",
            spec,
            extra_files=(data,) if (writer.folder / data).exists() else (),
            opset=OPSET,
            library_version=f"onnx {importlib.metadata.version('onnx')}",
        )


def _target_info(plan: Plan) -> TargetInfo:
    from eagle_export.models.target import target_dims

    dims = target_dims(plan.config)
    return TargetInfo(
        name=plan.target.name,
        family=plan.config.model_type,
        source=plan.target.source,
        sha256=plan.target.sha256,
        layers=dims.layers,
        hidden_size=dims.hidden_size,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        vocab_size=dims.vocab_size,
    )


def _head_info(plan: Plan, writer: BundleWriter) -> HeadInfo | None:
    """The head's identity and sizes; writes its vocabulary map unless draft ids are target ids."""
    if plan.head is None or plan.loaded is None:
        return None
    spec, table = plan.loaded.spec, plan.loaded.draft_to_target
    return HeadInfo(
        algorithm=spec.algorithm,  # type: ignore[arg-type]
        dialect=spec.dialect,
        source=plan.head.source,
        sha256=plan.head.sha256,
        target_sha256=plan.target.sha256,
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        draft_vocab_size=spec.draft_vocab_size,
        feature_layers=spec.feature_layers,
        vocab_map=None if _same_vocabulary(plan.loaded) else writer.write_vocab_map(table),
    )


def _same_vocabulary(loaded: LoadedHead) -> bool:
    """Whether draft ids are target ids, so that no map is needed."""
    return loaded.draft_to_target.tolist() == list(range(loaded.spec.vocab_size))


def _stop_tokens(plan: Plan, folder: Path) -> tuple[int, ...]:
    """Where answers end: the generation config's eos_token_id, else the tokenizer's, else the config's."""
    from eagle_run.text import Text

    ids = Text.load(folder / "tokenizer").eos_token_ids
    if not ids:
        eos = getattr(plan.config, "eos_token_id", None)
        ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(sorted({token for token in ids if 0 <= token < plan.config.vocab_size}))


def _bytes_needed(target: Path, head: Path | None, precision: str) -> int:
    """About what the graphs will take: the weights in the new precision, embeddings twice, a bit more."""
    width = 4 if precision == "fp32" else 2
    folders = [target] if head is None else [target, head]
    files = [path for folder in folders for path in weights.weight_files(folder)]
    return int(sum(_stored_bytes(path, width) for path in files) * 1.3) + 50_000_000


def _stored_bytes(path: Path, width: int) -> int:
    """Bytes of a safetensors file's values at `width` bytes each, from its header; a .bin counts as it is."""
    if path.suffix != ".safetensors":
        return path.stat().st_size
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    total = 0
    for entry in header.values():
        count = 1
        for size in entry["shape"]:
            count *= size
        total += count * width
    return total
