"""Is an engine file what the manifest says, and does it run here? Asked before and after it is loaded.

TensorRT's own answer to a wrong file is that there is no engine, and a line in its log; to a tensor bound
with another dtype it has none at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from eagle_run.backends.library import Library, declared
from eagle_run.backends.profiles import tensor_range
from eagle_run.bundle.engine_backends import compile_command
from eagle_run.bundle.manifest import Artifact
from eagle_run.errors import EagleError


def check_fit(library: Library, artifact: Artifact, where: str, capability: str, name: str) -> None:
    """Before loading: GPU and library must be those that the engine was compiled for.

    A later version of the library will do for a version-compatible engine. Raises EagleError.
    """
    command = compile_command(library.backend, capability)
    if not artifact.runs_on(capability):
        raise EagleError(
            f"{where}: expected a GPU of compute capability {' or '.join(artifact.compute_capabilities)}, "
            f"found {capability} ({name})",
            hint=f"compile for this GPU: {command}",
        )
    built = artifact.library_version.rpartition(" ")[2]
    if library.version == built:
        return
    here, there = _numbers(library.version), _numbers(built)
    compatible = artifact.engine is not None and artifact.engine.version_compatible
    if compatible and here[0] == there[0] and here >= there:
        return
    or_later = " or a later one" if compatible else ""
    raise EagleError(
        f"{where}: expected {artifact.library_version}{or_later}, found {library.label}",
        hint=f"compile again with this version: {command}; or install the one the engine is from",
    )


def check_header(library: Library, runtime: Any, header: bytes, where: str, log: Any) -> None:
    """What the library thinks of the first bytes of an engine, where it can say (TensorRT-RTX).

    Raises EagleError with its reasons for one that it would refuse.
    """
    if not hasattr(runtime, "get_engine_validity"):
        return
    log.last = ""
    verdict, reasons = runtime.get_engine_validity(header)
    if verdict != library.module.EngineValidity.INVALID:
        return
    known = library.module.EngineInvalidityDiagnostics.__members__.items()
    said = ", ".join(name.lower().replace("_", " ") for name, bit in known if int(reasons) & int(bit))
    raise EagleError(
        f"{where}: {library.label} refuses this engine: {said or log.last or 'it does not say why'}",
        hint="`eagle-export doctor` shows GPU, driver and versions; `eagle-export compile BUNDLE` makes "
        "engines for them",
    )


def check_engine(engine: Any, artifact: Artifact, where: str) -> None:
    """After loading: tensors, their places in memory and profiles are those in the manifest.

    Raises EagleError for the first that is not.
    """
    for expected, found in _differences(engine, artifact):
        raise EagleError(
            f"{where} is not the engine in the manifest: expected {expected}, found {found}",
            hint="compile the bundle again with `eagle-export compile BUNDLE`",
        )


def _differences(engine: Any, artifact: Artifact) -> Iterator[tuple[object, object]]:
    """(expected, found) of what differs."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    wanted = [tensor.name for tensor in (*artifact.inputs, *artifact.outputs)]
    if sorted(names) != sorted(wanted):
        odd = sorted(set(names) ^ set(wanted))
        yield f"{len(wanted)} tensors", f"{len(names)}, different in {', '.join(odd)}"
        return
    for mode, tensors in (("INPUT", artifact.spec().inputs), ("OUTPUT", artifact.spec().outputs)):
        for tensor in tensors:
            expected = (tensor.name, mode, *declared(tensor), "DEVICE")
            found = (
                tensor.name,
                engine.get_tensor_mode(tensor.name).name,
                engine.get_tensor_dtype(tensor.name).name,
                tuple(engine.get_tensor_shape(tensor.name)),
                engine.get_tensor_location(tensor.name).name,
            )
            if expected != found:
                yield expected, found
    yield from _alias_differences(engine, artifact)
    yield from _profile_differences(engine, artifact)


def _alias_differences(engine: Any, artifact: Artifact) -> Iterator[tuple[object, object]]:
    """Caches are updated in place: the engine itself must want past and present at one address."""
    if not hasattr(engine, "get_aliased_input_tensor"):
        return
    for tensor in artifact.outputs:
        expected = tensor.name.replace("present_", "past_") if tensor.name.startswith("present_") else None
        found = engine.get_aliased_input_tensor(tensor.name) or None
        if found != expected:
            yield f"{tensor.name} in the memory of {expected or 'no input'}", f"of {found or 'no input'}"


def _profile_differences(engine: Any, artifact: Artifact) -> Iterator[tuple[object, object]]:
    assert artifact.engine is not None
    profiles = artifact.engine.profiles
    if engine.num_optimization_profiles != len(profiles):
        yield f"{len(profiles)} profiles", engine.num_optimization_profiles
        return
    for place, profile in enumerate(profiles):
        for tensor in artifact.spec().inputs:
            expected = tensor_range(tensor, profile)
            found = tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(tensor.name, place))
            if found != expected:
                yield f"{tensor.name} of {expected} in profile {profile.name}", found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
