"""Runs requests to their ends, alone in the engine: what measuring, tuning and comparing are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.engine.engine import Engine
from eagle_run.engine.sequence import StoppingCriterion
from eagle_run.errors import EagleError
from eagle_run.metrics import Metrics, RoundTime
from eagle_run.outputs import RequestOutput
from eagle_run.params import SamplingParams


@dataclass(frozen=True)
class OfflineRequest:
    """A prompt as token ids, how to sample, and what may end an answer besides (see `Engine.add_request`)."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stopping_criterion: Callable[[], StoppingCriterion] | None = None

    def shortened(self, max_tokens: int) -> OfflineRequest:
        """The same with an answer of at most so many tokens."""
        most = max_tokens if self.params.max_tokens is None else min(max_tokens, self.params.max_tokens)
        return replace(self, params=replace(self.params, max_tokens=most))


@dataclass(frozen=True)
class OfflineRun:
    """The last output of every request in order, the run's metrics, and the time of each of its rounds."""

    outputs: list[RequestOutput]
    metrics: Metrics
    round_times: list[RoundTime]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The tokens of each request's first answer."""
        return [output.outputs[0].token_ids for output in self.outputs]


def run_offline(
    engine: Engine,
    requests: Sequence[OfflineRequest],
    speculative: SpeculativeConfig,
    *,
    on_output: Callable[[int, RequestOutput], None] | None = None,
) -> OfflineRun:
    """Decodes all requests; `on_output` is told of each output as it comes, with its request's number.

    Raises EagleError where the engine is at work for somebody else, for a request that cannot be decoded
    (then nothing is), and for one that failed.
    """
    if not engine.is_idle:
        raise EagleError("the engine has unfinished requests", hint="wait until they are done")
    start = engine.metrics.copy()
    numbers = {f"offline-{number}": number for number in range(len(requests))}
    finished: dict[int, RequestOutput] = {}
    try:
        for request_id, request in zip(numbers, requests, strict=True):
            engine.add_request(
                request_id,
                request.prompt_token_ids,
                request.params,
                speculative=speculative,
                stopping_criterion=request.stopping_criterion,
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = numbers[output.request_id]
                if output.error is not None:
                    raise output.error
                if output.finished:
                    finished[number] = output
                if on_output is not None:
                    on_output(number, output)
    finally:
        for request_id in numbers:
            engine.abort_request(request_id)
    metrics = engine.metrics.since(start)
    times = list(engine.round_times)[-metrics.steps :] if metrics.steps else []
    return OfflineRun([finished[number] for number in range(len(requests))], metrics, times)
