"""SHA-256 of large files, computed once and remembered in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from eagle_run.errors import EagleError
from eagle_run.json_files import read_json

_REMEMBERED = 512  # hashes kept in the cache file
_LOCK = threading.Lock()  # of threads that hash several files at once


def write_cache(where: Path, content: bytes) -> None:
    """Writes a file of a cache, whole or not at all. One that cannot be written only costs time."""
    temporary = where.with_name(f"{where.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(where)


def cache_dir(tool: str) -> Path:
    """Where this platform keeps a user's caches, for `tool`."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / tool


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered by (path, size, modification time). Raises OSError.

    The hash of a file that is written to meanwhile is of no one content: it is not remembered.
    """
    known, key, stamp = _remembered(), str(path.resolve()), _stamp(path)
    if known.get(key, [])[:2] == stamp:
        return str(known[key][2])
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _stamp(path) == stamp:
        _remember({key: [*stamp, digest]})
    return digest


def remember_sha256(digests: dict[Path, str]) -> None:
    """Note hashes that were just computed. A cache that cannot be written only costs time."""
    _remember({str(path.resolve()): [*_stamp(path), digest] for path, digest in digests.items()})


def _remember(entries: dict[str, list[Any]]) -> None:
    with _LOCK:
        known = _remembered()
        for key, entry in entries.items():
            known.pop(key, None)  # a renewed entry moves to the young end
            known[key] = entry
        kept = dict(list(known.items())[-_REMEMBERED:])
        write_cache(cache_dir("eagle-run") / "hashes.json", json.dumps(kept).encode())


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _remembered() -> dict[str, list[Any]]:
    try:
        known = read_json(cache_dir("eagle-run") / "hashes.json")
    except EagleError:
        return {}
    sound = isinstance(known, dict) and all(isinstance(v, list) and len(v) == 3 for v in known.values())
    return known if sound else {}
