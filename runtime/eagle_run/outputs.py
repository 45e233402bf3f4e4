"""What a request gives back: RequestOutput, with one CompletionOutput for each answer. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eagle_run.errors import EagleError
from eagle_run.metrics import Metrics

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """Of a token at its place: the natural log-probability under the target, and its rank (1: likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, as far as it goes; of a DELTA output what is new of it.

    `token_ids` end with the token that ended the answer, if one did; `text` ends before it. `logprobs` has an
    entry for every token: the token's own and the likeliest alternatives' by token id, None if not asked for.
    `finish_reason` is "stop" (an end token, a stop string, a stopping criterion), "length" (max_tokens or the
    context) or "abort", None while the answer is not over. `stop_reason` is the stop string or stop token id
    that ended it; None for the model's own end tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """What a request gave so far. `prompt` is None where the prompt came as tokens.

    `error` is why a request was aborted, when that was a fault and not a wish.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: Metrics = field(default_factory=Metrics)
    error: EagleError | None = None
