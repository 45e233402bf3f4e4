"""The compiler's own process: `python -m eagle_export.engines.worker`, started by `compile.compile_engine`.

A request comes in as JSON on stdin; JSON lines go out on stdout: {"progress": ...} and {"log": ...} while it
works, {"result": ...} or {"error": ...} at the end. In a process of its own a crash of the library, or the
kernel's choice to end it for lack of memory, costs nothing but this engine; the peak of memory is that of the
compiler alone; and Polygraphy, which talks to one library per process, can be told which.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from eagle_export.engines.request import EngineRequest
from eagle_export.progress import peak_memory_bytes
from eagle_run.errors import EagleError

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Compiles the request on stdin. What the library prints goes to stderr, not between our lines."""
    faulthandler.enable()
    gc.disable()  # freeing an object of TensorRT while it calls our logger would wait for its lock forever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the other side ends us
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        try:
            lines.write(json.dumps(message) + "\n")
        except BrokenPipeError:  # nobody is left who wants the engine
            os._exit(1)

    try:
        send({"result": compile_request(EngineRequest.from_json(json.load(sys.stdin)), send)})
    except EagleError as error:
        send({"error": {"message": error.message, "hint": error.hint, "parameters": error.parameters}})
    except MemoryError:
        send({"error": {"kind": "memory"}})
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        send({"error": {"kind": "disk", "message": str(error)}})


def compile_request(request: EngineRequest, send: Send) -> dict[str, Any]:
    """Compiles one graph into `request.out` with the library of its backend.

    Returns what the parent cannot know: file_bytes, seconds, peak_memory_bytes, library_version, layers by
    kind, summaries by profile, warnings. Raises EagleError for a graph that cannot be read or compiled.
    """
    from eagle_export.engines.build import build
    from eagle_run.backends.library import find_library

    start = time.perf_counter()
    library = find_library(request.backend)
    built = build(library, request, send)
    try:
        with request.out.open("wb") as file:
            file.write(built.engine)
    except BaseException:
        request.out.unlink(missing_ok=True)
        raise
    return {
        "file_bytes": request.out.stat().st_size,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_memory_bytes": peak_memory_bytes(),
        "library_version": library.label,
        "kinds": built.kinds,
        "summaries": [
            None if summary is None else summary.model_dump(mode="json") for summary in built.summaries
        ],
        "warnings": built.warnings,
    }


if __name__ == "__main__":
    main()
