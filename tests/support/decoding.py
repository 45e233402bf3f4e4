"""Requests as tests write them, run to their ends in an engine: tokens, text, reason of each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.engine.offline import OfflineRequest, OfflineRun, run_offline
from eagle_run.metrics import Metrics, total_metrics
from eagle_run.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Request:
    """One prompt as token ids and how to continue it, greedily unless `sampling` says otherwise."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=lambda: GREEDY)
    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    criterion: Callable[[], Callable[[int], bool]] | None = None

    @property
    def params(self) -> SamplingParams:
        return replace(
            self.sampling,
            max_tokens=self.max_new_tokens,
            stop_token_ids=tuple(self.stop_tokens),
            stop=self.stop_strings,
        )

    @property
    def offline(self) -> OfflineRequest:
        return OfflineRequest(self.prompt, self.params, self.criterion)


def run(engine: Engine, requests: Sequence[Request], shape: TreeShape, *, rule: str = "topk") -> OfflineRun:
    """All requests with this tree."""
    speculative = SpeculativeConfig(shape, AcceptanceRule(rule))
    return run_offline(engine, [request.offline for request in requests], speculative)


def answers_of(
    engine: Engine,
    requests: Sequence[Request],
    shape: TreeShape,
    *,
    rule: str = "topk",
    metrics: Metrics | None = None,
) -> list[Answer]:
    """The answers to all requests; `metrics`, if given, is filled with those of the run."""
    done = run(engine, requests, shape, rule=rule)
    if metrics is not None:
        vars(metrics).update(vars(total_metrics([metrics, done.metrics])))
    completions = [output.outputs[0] for output in done.outputs]
    return [Answer(each.token_ids, each.text, each.finish_reason) for each in completions]


def request_of(engine: Engine, prompt: str | list[dict[str, Any]], **options: Any) -> Request:
    """A request from a text (one user turn; `raw` leaves the template out) or from chat messages."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    raw, system = options.pop("raw", False), options.pop("system", None)
    if isinstance(prompt, str):
        ids = tokenizer.encode_prompt(prompt, system=system, raw=raw)
    else:
        ids = tokenizer.encode_chat(prompt)
    return Request(tuple(ids), stop_tokens=engine.stop_token_ids, **options)
