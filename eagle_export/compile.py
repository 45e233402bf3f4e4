"""`eagle-export compile`, and the last step of a build for TensorRT: from the graphs of a bundle to engines.

What compiles one graph is in engines/; here it is done for each.
"""

from __future__ import annotations

from pathlib import Path

from eagle_export.engines.architectures import arch_name, check_architectures
from eagle_export.engines.compile import compile_engine
from eagle_export.engines.library import find_library
from eagle_export.engines.profiles import choose_profiles
from eagle_export.engines.request import EngineRequest, EngineSettings
from eagle_export.estimate import estimate, memory_here, weigh_bundle
from eagle_export.options import EngineOptions
from eagle_export.progress import Report
from eagle_export.writer import BundleWriter, free_space
from eagle_run.bundle import Artifact, Bundle, Limits, TreeDefaults, load_bundle
from eagle_run.errors import EagleError


def compile_bundle(path: Path, options: EngineOptions, report: Report, *, out: Path | None = None) -> Bundle:
    """Compiles every ONNX graph of the bundle at `path` and returns the bundle with the engines.

    With `out` the result is a new bundle there; else it takes the place of the old one when all engines are
    done. Engines of the same backend and GPUs are replaced, others stay. An error or Ctrl-C leaves the bundle
    as it was. Raises EagleError for a bad bundle, and for what the library or the GPU cannot do.
    """
    with report.step("read the bundle"):
        bundle = load_bundle(path)
    manifest = bundle.manifest
    graphs = _onnx(manifest.artifacts)
    if not graphs:
        there = ", ".join(sorted({artifact.backend for artifact in manifest.artifacts}))
        raise EagleError(
            f"{path}: no ONNX graphs to compile, only {there}",
            hint="build it again from the weights with `eagle-export build`",
        )
    options.check(graphs[0].precision)
    capabilities = check_architectures(options.backend, graphs[0].precision, options.target_arch)
    names = options.profile_names(graphs[0].precision)
    needed = estimate(
        weigh_bundle(bundle),
        graphs[0].precision,
        exports=False,
        profiles={
            graph.graph: len(choose_profiles(graph.graph, manifest.limits, manifest.tree, names))
            for graph in graphs
        },
    )
    for warning in needed.check(memory_here(), free_space(out or path), out or path):
        report.note(f"warning: {warning}")

    def replaced(artifact: Artifact) -> bool:
        return artifact.backend == options.backend and artifact.compute_capabilities == capabilities

    with BundleWriter(out or path, force=out is None) as writer:
        writer.adopt(bundle, without=replaced)
        compile_graphs(writer, manifest.limits, manifest.tree, options, report)
        with report.step("write the manifest"):
            kept = ("target", "head", "limits", "tree", "stop_token_ids", "build", "quantization", "accuracy")
            return writer.finish(**{name: getattr(manifest, name) for name in kept})


def compile_graphs(
    writer: BundleWriter, limits: Limits, tree: TreeDefaults | None, options: EngineOptions, report: Report
) -> None:
    """Compiles every ONNX graph that `writer` has, and adds the engines to it."""
    library = find_library(options.backend)
    for graph in _onnx(writer.artifacts):
        capabilities = check_architectures(options.backend, graph.precision, options.target_arch)
        settings = EngineSettings(
            capabilities=capabilities,
            hardware_compatibility=options.hardware_compatibility,
            version_compatible=options.version_compatible,
            workspace_mib=options.workspace,
            optimization_level=options.optimization_level,
            timing_cache=options.timing_cache,
        )
        file = f"engines/{graph.graph}.{options.backend}-{'-'.join(map(arch_name, capabilities))}.engine"
        request = EngineRequest(
            backend=library.backend,
            graph=graph.graph,
            onnx=writer.folder / graph.file,
            out=writer.file(file),
            spec=graph.spec(),
            precision=graph.precision,
            profiles=choose_profiles(graph.graph, limits, tree, options.profile_names(graph.precision)),
            settings=settings,
        )
        with report.bar(f"compile {graph.graph} for {' '.join(map(arch_name, capabilities))}") as update:
            done = compile_engine(request, update)
        for warning in done.warnings:
            report.note(f"note: {warning}")
        writer.add_artifact(
            graph.graph,
            options.backend,  # type: ignore[arg-type]
            graph.precision,
            file,
            graph.spec(),
            library_version=done.library_version,
            compute_capabilities=done.capabilities,
            engine=done.info,
        )


def _onnx(artifacts: tuple[Artifact, ...]) -> list[Artifact]:
    return [artifact for artifact in artifacts if artifact.backend == "onnx"]
