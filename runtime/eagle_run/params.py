"""SamplingParams: how a request is sampled and when it ends. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from eagle_run.errors import UsageError

MAX_LOGPROBS = 20  # most alternatives that a request may ask for, as in vLLM
MAX_N = 1024


class RequestOutputKind(StrEnum):
    """What a request's outputs hold: everything so far, what is new, or nothing until the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    n: answers to the prompt; answer i is that of a single request with seed + i.
    temperature: 0 is greedy. top_p, top_k, min_p: filters of the target's distribution p; 1, 0 (or -1) and 0
    are off. They act in this order: temperature, top-k, top-p, min-p.
    seed: the tokens are a function of it; None takes a new one for every request.
    max_tokens: most tokens of an answer; None: as many as the context holds.
    stop: strings that end an answer, before which its text is cut. stop_token_ids: tokens that do, besides
    the model's own end tokens, which `ignore_eos` turns off.
    logprobs: the log-probability of every token under the target, and of so many likeliest alternatives; of
    the raw logits, before temperature and filters (vLLM's "raw_logprobs").
    skip_special_tokens: leave control tokens out of the text. include_stop_str_in_output: keep the stop
    string in it. detokenize: False gives tokens only, and then `stop` cannot be.

    Raises UsageError, naming the parameter, its range and what was given. Temperatures that float32 cannot
    tell from 0 or infinity are refused rather than silently changed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        if self.output_kind in list(RequestOutputKind):
            object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        for name, fits, expected in self._rules():
            if not fits:
                raise UsageError(
                    f"{name} should be {expected}, found {getattr(self, name)!r}",
                    hint=f"give another {name}, or leave it out",
                    parameters=[name],
                )
        if self.n > 1 and self.temperature == 0:
            raise UsageError(
                f"n should be 1 at temperature 0, where all answers are one, found {self.n}",
                hint="give a temperature, or ask once",
                parameters=["n", "temperature"],
            )
        if self.stop and not self.detokenize:
            raise UsageError("stop strings are found in the text, which detokenize=False leaves out")

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        whole, number = _is_whole, _is_number
        return (
            ("n", whole(self.n, 1, MAX_N), f"a whole number in [1, {MAX_N}]"),
            (
                "temperature",
                number(self.temperature) and (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6),
                "0 (greedy) or a number in [1e-6, 1e6]",
            ),
            (
                "top_k",
                whole(self.top_k, -1, 2**31 - 1),
                "a whole number in [0, 2^31), or -1 (0 and -1 are off)",
            ),
            ("top_p", number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1] (1 is off)"),
            ("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1] (0 is off)"),
            (
                "seed",
                self.seed is None or whole(self.seed, 0, 2**63 - 1),
                "None or a whole number in [0, 2^63)",
            ),
            (
                "max_tokens",
                self.max_tokens is None or whole(self.max_tokens, 1, 2**62),
                "None or a whole number of at least 1",
            ),
            (
                "stop",
                all(isinstance(text, str) and text for text in self.stop or ()),
                "texts of at least one character each",
            ),
            (
                "stop_token_ids",
                all(whole(token, 0, 2**62) for token in self.stop_token_ids or ()),
                "token ids",
            ),
            (
                "logprobs",
                self.logprobs is None or whole(self.logprobs, 0, MAX_LOGPROBS),
                f"None or a whole number in [0, {MAX_LOGPROBS}]",
            ),
            (
                "output_kind",
                isinstance(self.output_kind, RequestOutputKind),
                f"one of {', '.join(RequestOutputKind)}",
            ),
        )

    @property
    def filter_k(self) -> int:
        """top_k with 0 for off, however it was said."""
        return max(self.top_k, 0)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """Of one text, several values, or none; what is neither is left to the rules."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (values,)


def _is_whole(value: Any, least: int, most: int) -> bool:
    return _is_number(value) and value == int(value) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
