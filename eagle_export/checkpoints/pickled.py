"""Files that torch pickled: tensors and plain values alone are read, and what is refused is in our words."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_run.errors import EagleError


def load_pickled(path: Path, fault: str, *, hint: str, parameters: Sequence[str] = ()) -> Any:
    """The tensors and plain values in a file, on the CPU. No code in it is run.

    Raises EagleError, that it is what `fault` says and why, for a file that is damaged or holds more.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its parser runs into
        raise EagleError(f"{path}{fault}: {why_refused(error)}", hint=hint, parameters=parameters) from error


def why_refused(error: BaseException) -> str:
    """Why torch did not load a file. Not in its words: they advise to load it with whatever it brings."""
    refused = unpickling_error(error)
    if refused is None:
        return (
            error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or cut short"
        )
    asked = re.search(r"GLOBAL:? (\S+)", str(refused), re.IGNORECASE)
    if asked is None:
        return "it is damaged, or holds other things than tensors, which could run code"
    return f"it holds {asked[1]}, which is no tensor and could run code"


def unpickling_error(error: BaseException) -> pickle.UnpicklingError | None:
    """The refusal of a pickle among what led to an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, pickle.UnpicklingError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
