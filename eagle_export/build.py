"""`eagle-export build`: from a target and its head to a bundle, as a list of steps."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_export.compile import compile_graphs
from eagle_export.facts import (
    head_info,
    library_versions,
    quantization_info,
    same_vocabulary,
    stop_tokens,
    target_info,
)
from eagle_export.options import BuildOptions
from eagle_export.plan import Plan, check_room, estimate_plan, make_plan
from eagle_export.progress import Report, peak_memory_bytes
from eagle_export.quantization import Quantization, find_quantization
from eagle_export.writer import BundleWriter
from eagle_run.backends.library import find_library
from eagle_run.bundle import TOKENIZER, AccuracyInfo, Bundle, Limits

if TYPE_CHECKING:
    from eagle_export.estimate import Estimate
    from eagle_export.graphs.export import Rewrite
    from eagle_export.reference import Modules
    from eagle_run.backends.base import GraphSpec

_MEASURED = (10, 32)  # prompts, and tokens of each answer; `verify` takes more


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
    plan = _plan(options, report)
    with BundleWriter(plan.out, force=options.force) as writer:
        with report.step("write vocabulary map and tokenizer"):  # first: a tokenizer may be no good
            writer.copy_tokenizer(plan.target.folder)
            head = head_info(plan, writer)
        quantization = None
        if plan.precision == "fp8":
            quantization = find_quantization(plan, writer.folder / TOKENIZER, report)
        specs = _export(plan, quantization, writer.file("onnx/target.onnx").parent, report)
        _add_graphs(writer, specs, plan.precision)
        accuracy = measure_accuracy(plan, writer.folder, report) if plan.measure else None
        if plan.engine.compiles:
            compile_graphs(writer, plan.limits, plan.tree, plan.engine, report)
        with report.step("write the manifest"):
            bundle = writer.finish(
                target=target_info(plan),
                head=head,
                limits=plan.limits,
                tree=plan.tree,
                stop_token_ids=stop_tokens(plan, writer.folder),
                build={
                    "seconds": round(report.total_seconds(), 2),
                    "peak_memory_bytes": peak_memory_bytes(),
                    "versions": library_versions(),
                },
                quantization=None if quantization is None else quantization_info(plan, quantization, writer),
                accuracy=accuracy,
            )
    return Built(bundle, dict(report.seconds), report.total_seconds(), peak_memory_bytes())


def plan_only(options: BuildOptions) -> Estimate:
    """What `build` would take, without building anything. Raises as `build` does for what cannot be."""
    options.check()
    return estimate_plan(make_plan(options))


def export_only(options: BuildOptions, report: Report) -> Path:
    """Writes the graphs alone (and the head's vocabulary map) into the new or empty folder `options.out`."""
    options.check()
    plan = _plan(options, report)
    with BundleWriter(plan.out, force=False) as writer:
        quantization = None
        if plan.precision == "fp8":
            writer.copy_tokenizer(plan.target.folder)
            quantization = find_quantization(plan, writer.folder / TOKENIZER, report)
            shutil.rmtree(writer.folder / TOKENIZER)
        _export(plan, quantization, writer.folder, report)
        if plan.loaded is not None and not same_vocabulary(plan.loaded):
            writer.write_vocab_map(plan.loaded.draft_to_target)
        if plan.out.exists():
            plan.out.rmdir()
        writer.folder.rename(plan.out)
    return plan.out


def _export(
    plan: Plan, quantization: Quantization | None, folder: Path, report: Report
) -> dict[str, GraphSpec]:
    """Loads the weights and writes and checks the graphs. The weights are gone again when it returns."""
    with report.step("load the weights"):
        modules = _load(plan)
    specs = export_graphs(modules, plan.limits, folder, report, quantization)
    with report.step("check the graphs"):
        check_graphs(folder, specs)
    if quantization is not None and (along := quantization.kept_along):
        report.note(f"note: {len(along)} layers share a product with one kept in 16 bit: {along[0]}, …")
    return specs


def export_graphs(
    modules: Modules, limits: Limits, folder: Path, report: Report, quantization: Quantization | None = None
) -> dict[str, GraphSpec]:
    """Traces each module into `folder`/<graph>.onnx; the signatures by graph name."""
    from eagle_export.graphs.draft import export_draft
    from eagle_export.graphs.fuse import export_fuse
    from eagle_export.graphs.target import export_target

    def rewrite(graph: str) -> Rewrite | None:
        return None if quantization is None else quantization.rewrite(graph)

    specs: dict[str, GraphSpec] = {}
    with report.step("export target"):
        specs["target"] = export_target(
            modules.target,
            folder / "target.onnx",
            cache_rows=limits.cache_rows,
            rewrite=rewrite("target"),
        )
    if modules.fuse is not None:
        with report.step("export fuse"):
            specs["fuse"] = export_fuse(modules.fuse, folder / "fuse.onnx", rewrite=rewrite("fuse"))
    if modules.draft is not None:
        with report.step("export draft"):
            specs["draft"] = export_draft(
                modules.draft,
                folder / "draft.onnx",
                cache_rows=limits.draft_cache_rows,
                rewrite=rewrite("draft"),
            )
    return specs


def check_graphs(folder: Path, specs: dict[str, GraphSpec]) -> None:
    """Raises EagleError unless every graph passes ONNX's full check with standard operators only."""
    from eagle_export.graphs.check import check_file

    for name, spec in specs.items():
        check_file(folder / f"{name}.onnx", spec)


def measure_accuracy(plan: Plan, folder: Path, report: Report) -> AccuracyInfo | None:
    """The graphs in `folder`/onnx against the same weights in float32, on a few of our own prompts.

    None for fp32, which is its own reference, and where no CPU runtime computes the precision.
    """
    from eagle_export.accuracy import choose_requests, measure, runnable_graphs
    from eagle_export.reference import DTYPES, load_modules
    from eagle_run.text import Text

    if plan.precision == "fp32":
        return None
    if plan.precision == "fp8" and plan.dtype == "bf16":
        report.note("note: nothing on a CPU runs fp8 with a bf16 base; its accuracy is not measured")
        return None
    with report.step("load the weights in fp32"):
        reference = load_modules(plan.target, plan.loaded, DTYPES["fp32"])
        own = _load(plan) if plan.precision == "bf16" else reference
        files = {path.stem: path for path in (folder / "onnx").glob("*.onnx")}
        graphs, backend = runnable_graphs(files, own, plan.precision, plan.limits.cache_rows)
    text = Text.load(folder / TOKENIZER)
    requests = choose_requests(
        text,
        stop_tokens(plan, folder),
        max_seq_len=plan.limits.max_seq_len,
        limit=_MEASURED[0],
        max_new_tokens=_MEASURED[1],
    )
    shape = None if plan.tree is None else plan.tree.shape()
    return measure(graphs, reference, requests, report, limits=plan.limits, tree=shape, backend=backend)


def _plan(options: BuildOptions, report: Report) -> Plan:
    """The checked plan; says what a user should know before it costs time."""
    if options.engine.compiles:
        find_library(options.engine.backend)
    with report.step("find the weights"):
        plan = make_plan(options)
    for warning in check_room(plan):
        report.note(f"warning: {warning}")
    if plan.dtype == "bf16":
        report.note("note: ONNX Runtime computes bf16 on GPUs only; on a CPU this bundle will not load")
    return plan


def _load(plan: Plan) -> Modules:
    from eagle_export.reference import DTYPES, load_modules

    return load_modules(plan.target, plan.loaded, DTYPES[plan.dtype])


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
