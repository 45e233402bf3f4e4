"""eagle-run: a lean runtime that decodes with an EAGLE bundle, losslessly at every temperature.

from eagle_run import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_run.telemetry import disable_telemetry
from eagle_run.version import __version__ as __version__

if TYPE_CHECKING:
    from eagle_run.async_llm import AsyncLLM
    from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
    from eagle_run.decoding.tree import TreeShape
    from eagle_run.engine.engine import Engine
    from eagle_run.errors import EagleError
    from eagle_run.llm import LLM
    from eagle_run.metrics import Metrics
    from eagle_run.outputs import CompletionOutput, Logprob, RequestOutput
    from eagle_run.params import RequestOutputKind, SamplingParams

disable_telemetry()

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Engine": "engine.engine",
    "SamplingParams": "params",
    "RequestOutputKind": "params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "Metrics": "metrics",
    "SpeculativeConfig": "decoding.config",
    "AcceptanceRule": "decoding.config",
    "TreeShape": "decoding.tree",
    "EagleError": "errors",
}
__all__ = [
    "LLM",
    "AcceptanceRule",
    "AsyncLLM",
    "CompletionOutput",
    "EagleError",
    "Engine",
    "Logprob",
    "Metrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "TreeShape",
]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: `eagle-run --help` imports this package and must be fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
