"""Compiles one ONNX graph: starts the compiler's process, relays its progress, explains its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from eagle_export.engines.request import CompiledEngine, EngineRequest
from eagle_run.bundle.records import EngineInfo, EngineProfile, LayerSummary
from eagle_run.errors import EagleError

OnProgress = Callable[[float, str], None]  # share done (0 to 1), what is going on
_MEMORY_PER_WEIGHT_BYTE = 3.2  # resident memory of a build, from builds of 0.1 to 1.5 billion parameters
_WORKER = (sys.executable, "-m", "eagle_export.engines.worker")


def compile_engine(
    request: EngineRequest, on_progress: OnProgress | None = None, *, command: tuple[str, ...] = _WORKER
) -> CompiledEngine:
    """Compiles `request.onnx` into `request.out`, which is replaced only when the engine is whole.

    on_progress is called a few times a second, from this thread. An error or Ctrl-C ends the compiler's
    process and leaves nothing behind. `command` starts that process.

    Raises UsageError for settings that the backend does not have, and EagleError when engine or timing
    cache cannot be written, the graph cannot be read or lost something when it was read (see
    `network.check_network`), the compiler gives up or crashes, or memory or disk do not suffice.
    """
    request.settings.check(request.backend)
    if not request.onnx.is_file():
        raise EagleError(f"{request.onnx} does not exist", hint="export it first")
    _check_writable(request)
    with _unfinished(request.out) as temporary:
        result = _run(EngineRequest(**{**vars(request), "out": temporary}), on_progress, command)
        temporary.replace(request.out)
    summaries = [
        None if summary is None else LayerSummary.model_validate(summary) for summary in result["summaries"]
    ]
    profiles = zip(request.profiles, summaries, strict=True)
    settings, kinds = request.settings, result["kinds"]
    info = EngineInfo(
        profiles=tuple(
            EngineProfile(name=profile.name, axes=profile.axes, layers=layers) for profile, layers in profiles
        ),
        hardware_compatibility=settings.hardware_compatibility,
        version_compatible=settings.version_compatible,
        attention_layers=kinds.get("ATTENTION_INPUT", 0),
        cache_updates=kinds.get("KV_CACHE_UPDATE", 0),
        seconds=result["seconds"],
        peak_memory_bytes=result["peak_memory_bytes"],
    )
    return CompiledEngine(
        path=request.out,
        file_bytes=result["file_bytes"],
        info=info,
        library_version=result["library_version"],
        capabilities=settings.capabilities,
        warnings=tuple(result["warnings"]),
    )


def weight_bytes(onnx: Path) -> int:
    """Bytes of a graph's weights: of its file and of the data beside it."""
    data = onnx.with_name(onnx.name + ".data")
    return sum(path.stat().st_size for path in (onnx, data) if path.is_file())


def _run(request: EngineRequest, on_progress: OnProgress | None, command: tuple[str, ...]) -> dict[str, Any]:
    """The result of the compiler's process. Whatever happens here, no process stays behind."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        try:
            last, log = _talk(process, request, on_progress)
            code = process.wait()
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]
        if "result" in last:
            return last["result"]
        raise _explain(request, last.get("error"), code, log, _tail(stderr))


def _talk(
    process: subprocess.Popen[str], request: EngineRequest, on_progress: OnProgress | None
) -> tuple[dict[str, Any], list[str]]:
    """Hands the request over and reads to the end: (the last message, lines of the library's log)."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once; its exit code says why
        process.stdin.write(json.dumps(request.to_json()))
        process.stdin.close()
    last: dict[str, Any] = {}
    log: list[str] = []
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:  # half a line of a process that was killed
            continue
        if "progress" in message:
            if on_progress is not None:
                on_progress(*message["progress"])
        elif "log" in message:
            log = [message["log"]]  # the last words are enough
        else:
            last = message
    return last, log


def _explain(
    request: EngineRequest, error: dict[str, Any] | None, code: int, log: list[str], stderr: str
) -> EagleError:
    """Why there is no result."""
    kind = (error or {}).get("kind")
    if error is not None and kind is None:
        return EagleError(error["message"], hint=error["hint"], parameters=error["parameters"])
    last_words = f"; its last words: {log[-1]}" if log else ""
    if kind == "disk":
        return EagleError(
            f"{request.out.parent}: no space is left to write the engine",
            hint="free some disk space; an engine is a little larger than its graph's weights",
        )
    if kind == "memory" or code == -getattr(signal, "SIGKILL", 9):
        needed = weight_bytes(request.onnx) * _MEMORY_PER_WEIGHT_BYTE + 5e8
        return EagleError(
            f"the compiler was ended while it compiled the {request.graph} graph, most likely because memory "
            f"ran out: about {needed / 1e9:.1f} GB are needed{last_words}",
            hint="close other programs, add swap, or compile on a machine with more memory "
            "(tensorrt-rtx needs no GPU)",
        )
    if code == -signal.SIGTERM:
        return EagleError(
            f"the compiler was told to end while it compiled the {request.graph} graph", hint="run it again"
        )
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return EagleError(
            f"{request.backend} crashed ({name}) while it compiled the {request.graph} graph{last_words}",
            hint="this is a fault of the library; another version or other profiles may do. "
            f"Please report it with this: {stderr or 'nothing on stderr'}",
            parameters=["profiles"],
        )
    return EagleError(
        f"the compiler of the {request.graph} graph ended with exit code {code} and no engine{last_words}",
        hint=stderr or "it printed nothing; please report it",
    )


def _tail(stderr: IO[bytes]) -> str:
    """The last lines that the compiler printed."""
    stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, stderr.tell() - 2000))
    return "\n".join(stderr.read().decode(errors="replace").splitlines()[-8:])


def _check_writable(request: EngineRequest) -> None:
    """Before minutes of compiling: can the engine and the timing cache be written where they should go?"""
    cache = request.settings.timing_cache
    for path, parameter in ((request.out, "out"), (cache, "timing_cache")):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
            if path.exists():
                path.open("ab").close()
        except OSError as error:
            raise EagleError(
                f"{path} cannot be written: {error.strerror or error}",
                hint="make the folder writable for this user, or choose another",
                parameters=[parameter],
            ) from error


@contextlib.contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """A file beside `out` to write to, gone again afterwards."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
