"""`eagle-export compile`, and the last step of a build for TensorRT: from the graphs of a bundle to engines.

What compiles one graph is in engines/; here it is done for each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle_export.engines.architectures import arch_name, check_architectures
from eagle_export.engines.compile import compile_engine
from eagle_export.engines.profiles import choose_profiles
from eagle_export.engines.request import EngineRequest, EngineSettings
from eagle_export.output_folder import check_writable, free_space
from eagle_export.pipeline.estimate import estimate, memory_here
from eagle_export.pipeline.options import EngineOptions
from eagle_export.pipeline.partial import partial_bytes
from eagle_export.pipeline.resume import tool_identity
from eagle_export.pipeline.writer import BundleWriter
from eagle_export.progress import Progress
from eagle_run.backends.library import Library, find_library
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.bundle.manifest import Artifact, Limits, TreeDefaults
from eagle_run.bundle.records import EngineInfo, EngineProfile
from eagle_run.errors import EagleError, UsageError


def compile_bundle(
    path: Path, options: EngineOptions, progress: Progress, *, out: Path | None = None, fresh: bool = False
) -> Bundle:
    """Compiles every ONNX graph of the bundle at `path` and returns the bundle with the engines.

    With `out` the result is a new bundle there; else it takes the place of the old one when all engines are
    done. Engines of the same backend and GPUs are replaced, other files stay. An error or Ctrl-C leaves the
    bundle as it was; the next run takes over what was compiled, unless it is to start `fresh`. Raises
    EagleError for a bad bundle, and for what the library or the GPU cannot do.
    """
    path = path.resolve()  # a link to a bundle stays a link
    if out is not None:
        _check_out(out, path)
    check_writable(out or path)
    with progress.step("read the bundle"):
        bundle = load_bundle(path)
    manifest = bundle.manifest
    graphs = _onnx(manifest.artifacts)
    if not graphs:
        backends = ", ".join(sorted({artifact.backend for artifact in manifest.artifacts}))
        raise EagleError(
            f"{path}: no ONNX graphs to compile, only {backends}",
            hint="build it again from the weights with `eagle-export build`",
        )
    options.check(graphs[0].precision)
    find_library(options.backend)
    capabilities = check_architectures(options.backend, graphs[0].precision, options.target_arch)
    for note in _check_room(bundle, graphs, options, out):
        progress.note(note)

    def replaced(artifact: Artifact) -> bool:
        return artifact.backend == options.backend and artifact.compute_capabilities == capabilities

    identity = {"command": "compile", "bundle": manifest.model_dump(mode="json"), "tool": tool_identity()}
    with BundleWriter(
        out or path, force=out is None, identity=identity, fresh=fresh, note=progress.note
    ) as writer:
        writer.adopt(bundle, without=replaced)
        writer.keep()
        compile_graphs(writer, manifest.limits, manifest.tree, options, progress)
        with progress.step("write the manifest"):
            return writer.finish_like(manifest)


def compile_graphs(
    writer: BundleWriter,
    limits: Limits,
    tree: TreeDefaults | None,
    options: EngineOptions,
    progress: Progress,
) -> None:
    """Compiles every ONNX graph that `writer` has, and adds the engines to it."""
    library = find_library(options.backend)
    for graph in _onnx(writer.artifacts):
        capabilities = check_architectures(options.backend, graph.precision, options.target_arch)
        arches = [arch_name(capability) for capability in capabilities]
        file = f"engines/{graph.graph}.{options.backend}-{'-'.join(arches)}.engine"
        request = EngineRequest(
            backend=library.backend,
            graph=graph.graph,
            onnx=writer.folder / graph.file,
            out=writer.file(file),
            spec=graph.spec(),
            precision=graph.precision,
            profiles=_profiles(graph, limits, tree, options),
            settings=EngineSettings(
                capabilities=capabilities,
                hardware_compatibility=options.hardware_compatibility,
                version_compatible=options.version_compatible,
                workspace_mib=options.workspace,
                optimization_level=options.optimization_level,
                timing_cache=options.timing_cache,
            ),
        )
        compiled = _compile(writer, graph, request, library, progress)
        writer.add_artifact(
            graph.graph,
            options.backend,  # type: ignore[arg-type]
            graph.precision,
            file,
            graph.spec(),
            **compiled,
        )


def _compile(
    writer: BundleWriter, graph: Artifact, request: EngineRequest, library: Library, progress: Progress
) -> dict[str, Any]:
    """What the manifest says of an engine: one that is compiled now, or was in a run that ended early."""
    step = f"compile {graph.graph} for {' '.join(map(arch_name, request.settings.capabilities))}"
    settings = replace(request.settings, timing_cache=None)  # it decides how long it takes
    key = {
        "library": library.label,
        "graph": [entry.sha256 for entry in graph.files],
        "profiles": [profile.model_dump(mode="json") for profile in request.profiles],
        "settings": asdict(settings),
    }
    if (recalled := writer.journal.recall(step, key)) is not None:
        engine = EngineInfo.model_validate_json(json.dumps(recalled.facts["engine"]))
        return recalled.facts | {"engine": engine}
    with progress.bar(step) as update:
        compiled = compile_engine(request, update)
    for warning in compiled.warnings:
        progress.note(f"note: {warning}")
    facts = {"library_version": compiled.library_version, "compute_capabilities": compiled.capabilities}
    file = request.out.relative_to(writer.folder).as_posix()
    writer.journal.record(step, [file], {**facts, "engine": compiled.info.model_dump(mode="json")}, key)
    return {**facts, "engine": compiled.info}


def _profiles(
    graph: Artifact, limits: Limits, tree: TreeDefaults | None, options: EngineOptions
) -> tuple[EngineProfile, ...]:
    names = options.profile_names(graph.precision, has_head=tree is not None)
    return choose_profiles(graph.graph, limits, tree, names, precision=graph.precision)


def _check_out(out: Path, path: Path) -> None:
    new = out.resolve()
    if new == path or path in new.parents:
        raise UsageError(
            f"{out} is the bundle itself, or inside it",
            hint="leave it out to add the engines to the bundle",
            parameters=["out"],
        )
    if new.exists() and (new.is_file() or any(new.iterdir())):
        raise EagleError(
            f"{out} already exists; it is left alone",
            hint="choose another folder, or leave it out to add the engines to the bundle",
            parameters=["out"],
        )


def _check_room(
    bundle: Bundle, graphs: list[Artifact], options: EngineOptions, out: Path | None
) -> tuple[str, ...]:
    """What it takes, and warnings. Raises EagleError for a disk too small, also for copies with `out`."""
    from eagle_export.pipeline.sizes import weigh_bundle

    manifest = bundle.manifest
    profiles: dict[str, int] = {
        g.graph: len(_profiles(g, manifest.limits, manifest.tree, options)) for g in graphs
    }
    needed = estimate(weigh_bundle(bundle), graphs[0].precision, exports=False, profiles=profiles)
    copies = 0 if out is None else sum(entry.bytes for entry in manifest.files())
    folder = out or bundle.path
    needed = replace(needed, disk_bytes=needed.disk_bytes + copies)
    return (
        needed.line(),
        *needed.check(memory_here(), free_space(folder) + partial_bytes(folder), folder),
    )


def _onnx(artifacts: tuple[Artifact, ...]) -> list[Artifact]:
    return [artifact for artifact in artifacts if artifact.backend == "onnx"]
