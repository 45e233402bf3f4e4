"""`eagle-export build`: from a target and its head to a bundle, as a list of steps."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_export.pipeline.compile import compile_graphs
from eagle_export.pipeline.facts import (
    head_info,
    library_versions,
    quantization_info,
    same_vocabulary,
    stop_tokens,
    target_info,
)
from eagle_export.pipeline.options import BuildOptions
from eagle_export.pipeline.plan import Plan, estimate_plan, fit, make_plan
from eagle_export.pipeline.quantization import Quantization, check_fp8, find_quantization
from eagle_export.pipeline.resume import build_identity, recall_graph, record_graph
from eagle_export.pipeline.writer import BundleWriter
from eagle_export.progress import Progress, peak_memory_bytes
from eagle_run.backends.library import find_library
from eagle_run.bundle.loading import TOKENIZER, Bundle
from eagle_run.bundle.manifest import Limits
from eagle_run.bundle.records import AccuracyInfo

if TYPE_CHECKING:
    from eagle_export.graphs.export import Options
    from eagle_export.graphs.links import Links
    from eagle_export.pipeline.estimate import Estimate
    from eagle_export.pipeline.partial import Partial
    from eagle_export.reference.modules import Modules
    from eagle_run.bundle.tensors import GraphSpec

_MEASURED = (10, 32)  # prompts, and tokens of each answer; `verify` takes more


@dataclass(frozen=True)
class Built:
    """What a build made, and what it took: seconds by step, the most resident memory of the process."""

    bundle: Bundle
    seconds: dict[str, float]
    total_seconds: float
    peak_memory_bytes: int


def build(options: BuildOptions, progress: Progress) -> Built:
    """Builds a bundle at `options.out` (default bundles/<recipe>-<head>).

    Raises UsageError for options that make no sense and EagleError for everything else that can be wrong,
    which leaves nothing behind. After Ctrl-C, a crash, a full disk or an error of the compiler the next run
    goes on with what was finished. An existing bundle stays as it was.
    """
    options.check()
    plan = _plan(options, progress)
    with progress.step("identify the weights"):
        identity = build_identity(plan, "build")
    with BundleWriter(
        plan.out,
        force=options.force,
        identity=identity,
        check=plan.unchanged,
        fresh=options.fresh,
        note=progress.note,
    ) as writer:
        with progress.step("write vocabulary map and tokenizer"):  # first: a tokenizer may be no good
            writer.copy_tokenizer(plan.target.folder)
            head = head_info(plan, writer)
        quantization = None
        if plan.precision == "fp8":
            quantization = find_quantization(plan, writer.folder / TOKENIZER, progress, writer.journal)
        specs = _export(plan, quantization, writer.file("onnx/target.onnx").parent, progress, writer.journal)
        _add_graphs(writer, specs, plan.precision, _links(plan))
        writer.keep()  # whatever fails now, the input was good
        accuracy = _find_accuracy(plan, writer, progress) if plan.measure else None
        if plan.engine.compiles:
            compile_graphs(writer, plan.limits, plan.tree, plan.engine, progress)
        with progress.step("write the manifest"):
            bundle = writer.finish(
                target=target_info(plan),
                head=head,
                limits=plan.limits,
                tree=plan.tree,
                stop_token_ids=stop_tokens(plan, writer.folder),
                build={
                    "seconds": round(progress.total_seconds(), 2),
                    "peak_memory_bytes": peak_memory_bytes(),
                    "versions": library_versions(),
                },
                quantization=None if quantization is None else quantization_info(plan, quantization, writer),
                accuracy=accuracy,
            )
    return Built(bundle, dict(progress.seconds), progress.total_seconds(), peak_memory_bytes())


def plan_only(options: BuildOptions) -> Estimate:
    """What `build` would take, without building anything. Raises as `build` does for what cannot be.

    A bundle that is there already is no hindrance, nor is a machine that is too small for it.
    """
    options.check()
    plan = make_plan(replace(options, force=True))
    check_fp8(plan)
    return estimate_plan(plan)


def export_only(options: BuildOptions, progress: Progress) -> Path:
    """Writes the graphs alone (and the head's vocabulary map) into the new or empty folder `options.out`."""
    options.check()
    plan = _plan(options, progress)
    with progress.step("identify the weights"):
        identity = build_identity(plan, "export")
    with BundleWriter(
        plan.out, identity=identity, check=plan.unchanged, fresh=options.fresh, note=progress.note
    ) as writer:
        quantization = None
        if plan.precision == "fp8":
            writer.copy_tokenizer(plan.target.folder)
            quantization = find_quantization(plan, writer.folder / TOKENIZER, progress, writer.journal)
            shutil.rmtree(writer.folder / TOKENIZER)
        _export(plan, quantization, writer.folder, progress, writer.journal)
        if plan.loaded is not None and not same_vocabulary(plan.loaded):
            writer.write_vocab_map(plan.loaded.draft_to_target)
        writer.journal.publish(plan.out, ())
    return plan.out


def _export(
    plan: Plan, quantization: Quantization | None, folder: Path, progress: Progress, journal: Partial
) -> dict[str, GraphSpec]:
    """Writes the graphs that are not there yet and checks them all. Weights are read as they are written."""
    from eagle_export.graphs.files import data_files

    names = ["target"]
    if plan.loaded is not None:
        names += ["fuse", "draft"] if plan.loaded.spec.has_fuse else ["draft"]
    links = _links(plan)
    known = {name: recall_graph(journal, name, quantization) for name in names}
    specs = {name: spec for name, spec in known.items() if spec is not None}
    if len(specs) < len(names):
        from eagle_export.reference.modules import DTYPES, load_hollow

        with progress.step("read the headers of the weights"):
            modules = load_hollow(plan.target, plan.loaded, DTYPES[plan.dtype], plan.limits.max_seq_len)
        for name in names:
            if name not in specs:
                specs[name] = export_graph(
                    name, modules, plan.limits, folder, progress, quantization=quantization, links=links
                )
                file = folder / f"{name}.onnx"
                record_graph(journal, specs[name], [file, *data_files(file)], quantization)
    with progress.step("check the graphs"):
        check_graphs(folder, specs)
    files = {file for name in names for file in data_files(folder / f"{name}.onnx")}
    if links is not None and not any(links.origin(file.name) for file in files):
        progress.note(f"note: nothing is linked: the checkpoint holds no large weight in {plan.dtype}")
    if quantization is not None and (along := quantization.kept_along):
        progress.note(f"note: {len(along)} layers share a product with one kept in 16 bit: {along[0]}, …")
    return {name: specs[name] for name in names}


def export_graph(
    name: str,
    modules: Modules,
    limits: Limits,
    folder: Path,
    progress: Progress,
    *,
    quantization: Quantization | None = None,
    links: Links | None = None,
) -> GraphSpec:
    """Traces the module of a graph into `folder`/<name>.onnx and returns the graph's signature."""
    from eagle_export.graphs.draft import export_draft
    from eagle_export.graphs.fuse import export_fuse
    from eagle_export.graphs.target import export_target

    path = folder / f"{name}.onnx"
    options: Options = {"weights": modules.weights.get(name)}
    if quantization is not None:
        options["rewrite"] = quantization.rewrite(name)
    if links is not None:
        quantized = {} if quantization is None else quantization.chosen.inputs.get(name, {})
        options["links"] = links.writing(quantized)
    with progress.step(f"export {name}"):
        if name == "target":
            return export_target(modules.target, path, cache_rows=limits.cache_rows, **options)
        if name == "fuse":
            assert modules.fuse is not None
            return export_fuse(modules.fuse, path, **options)
        assert modules.draft is not None
        return export_draft(modules.draft, path, cache_rows=limits.draft_cache_rows, **options)


def check_graphs(folder: Path, specs: dict[str, GraphSpec]) -> None:
    """Raises EagleError unless every graph passes ONNX's full check with standard operators only."""
    from eagle_export.graphs.check import check_file

    for name, spec in specs.items():
        check_file(folder / f"{name}.onnx", spec)


def measure_accuracy(plan: Plan, folder: Path, progress: Progress) -> AccuracyInfo | None:
    """The graphs in `folder`/onnx against the same weights in float32, on a few of our own prompts.

    None for fp32, which is its own reference, and where no CPU runtime computes the precision.
    """
    from eagle_export.reference.modules import DTYPES, load_modules
    from eagle_export.verify.accuracy import choose_requests, measure, runnable_graphs
    from eagle_run.tokenizer import Tokenizer

    if plan.precision == "fp32":
        return None
    if plan.precision == "fp8" and plan.dtype == "bf16":
        progress.note("note: nothing on a CPU runs fp8 with a bf16 base; its accuracy is not measured")
        return None
    with progress.step("load the weights in fp32"):
        reference = load_modules(plan.target, plan.loaded, DTYPES["fp32"], plan.limits.max_seq_len)
        own = reference
        if plan.precision == "bf16":
            own = load_modules(plan.target, plan.loaded, DTYPES[plan.dtype], plan.limits.max_seq_len)
        files = {path.stem: path for path in (folder / "onnx").glob("*.onnx")}
        graphs, backend = runnable_graphs(files, own, plan.precision, plan.limits.cache_rows)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    requests = choose_requests(
        tokenizer,
        stop_tokens(plan, folder),
        max_seq_len=plan.limits.max_seq_len,
        limit=_MEASURED[0],
        max_tokens=_MEASURED[1],
    )
    shape = None if plan.tree is None else plan.tree.shape()
    return measure(graphs, reference, requests, progress, limits=plan.limits, tree=shape, backend=backend)


def _find_accuracy(plan: Plan, writer: BundleWriter, progress: Progress) -> AccuracyInfo | None:
    """What was measured now, or in a run that was interrupted later."""
    step, key = "measure the accuracy", None if plan.tree is None else plan.tree.model_dump()
    if (recalled := writer.journal.recall(step, key)) is not None:
        return AccuracyInfo.model_validate(recalled.facts)
    accuracy = measure_accuracy(plan, writer.folder, progress)
    if accuracy is not None:
        writer.journal.record(step, facts=accuracy.model_dump(mode="json"), key=key)
    return accuracy


def _plan(options: BuildOptions, progress: Progress) -> Plan:
    """The checked plan; says what a user should know before it costs time."""
    if options.engine.compiles:
        find_library(options.engine.backend)
    with progress.step("find the weights"):
        plan = make_plan(options)
        check_fp8(plan)
    plan, needed, notes = fit(plan)
    progress.note(needed.line())
    for note in notes:
        progress.note(note)
    if plan.dtype == "bf16":
        progress.note("note: ONNX Runtime computes bf16 on GPUs only; on a CPU this bundle will not load")
    return plan


def _links(plan: Plan) -> Links | None:
    """The folders whose weights may stay where they are, with what the names of their links begin with."""
    from eagle_export.graphs.links import Links

    if not plan.link_weights:
        return None
    return Links({plan.target.folder: "target-"} | ({plan.head.folder: "head-"} if plan.head else {}))


def _add_graphs(
    writer: BundleWriter, specs: dict[str, GraphSpec], precision: str, links: Links | None
) -> None:
    from eagle_export.graphs.files import data_files
    from eagle_export.models.ops import OPSET

    for name, spec in specs.items():
        files = data_files(writer.folder / f"onnx/{name}.onnx")
        data = {f"onnx/{file.name}": None if links is None else links.origin(file.name) for file in files}
        writer.add_artifact(
            name,  # type: ignore[arg-type]
            "onnx",
            precision,
            f"onnx/{name}.onnx",
            spec,
            extra_files=data,
            opset=OPSET,
            library_version=f"onnx {importlib.metadata.version('onnx')}",
        )
