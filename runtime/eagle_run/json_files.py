"""JSON that others wrote: read with caps on size and depth, so that no file exhausts memory or the stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_run.errors import EagleError

MAX_BYTES = 64 << 20  # of a file or a line; the largest index of a sharded checkpoint takes 10 MB
MAX_DEPTH = 64  # lists and objects within each other; what real files hold is below 20
MAX_VALUES = 10_000_000  # in one document; what it names several times counts each time


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, hint: str = "") -> Any:
    """The value in a JSON file of UTF-8, with or without a byte order mark.

    Raises EagleError, with `hint`, for a file that cannot be read, holds something else, is larger than
    `max_bytes`, or nests deeper than MAX_DEPTH.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes, hint=hint), str(path), hint=hint)


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES, hint: str = "") -> dict[str, Any]:
    """As `read_json`, of a file that must hold an object."""
    data = read_json(path, max_bytes=max_bytes, hint=hint)
    if not isinstance(data, dict):
        raise EagleError(f"{path}: expected a JSON object, found {type(data).__name__}", hint=hint)
    return data


def parse_json(text: str | bytes, where: str, *, hint: str = "") -> Any:
    """The value in a JSON text. `where` names it in errors, as `read_json` raises them."""
    try:
        data = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except ValueError as error:
        raise EagleError(f"{where}: not readable as JSON: {error}", hint=hint) from None
    except RecursionError:
        raise _too_deep(where, hint) from None
    check_nesting(data, where, hint=hint)
    return data


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES, hint: str = "") -> bytes:
    """A whole file. Raises EagleError where it cannot be read or is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise EagleError(f"{path}: cannot be read: {error.strerror or error}", hint=hint) from None
    if len(data) > max_bytes:
        raise EagleError(f"{path}: larger than {max_bytes:,} bytes, more than such a file takes", hint=hint)
    return data


def check_nesting(data: Any, where: str, *, hint: str = "") -> None:
    """Raises EagleError where lists and dicts nest deeper than MAX_DEPTH or hold more than MAX_VALUES values.

    Also of a value that is not a tree, as YAML's references make: what is there twice counts twice.
    """
    open_ones = [iter((data,))]
    count = 0
    while open_ones:
        for value in open_ones[-1]:
            if isinstance(value, dict | list):
                open_ones.append(iter(value.values() if isinstance(value, dict) else value))
                count += len(value)
                break
        else:
            open_ones.pop()
            continue
        if len(open_ones) > MAX_DEPTH + 1:
            raise _too_deep(where, hint)
        if count > MAX_VALUES:
            raise EagleError(f"{where}: more than {MAX_VALUES:,} values", hint=hint)


def _too_deep(where: str, hint: str) -> EagleError:
    return EagleError(f"{where}: lists or objects nested more than {MAX_DEPTH} deep", hint=hint)
