"""How the graphs of a set are decoded for a measurement, and whether decoding is right.

Everything goes through the real `Engine`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.gpu_measure import Timeline
from benchmarks.gpu_models import Measured, Setup
from eagle_run.bench.mismatch import find_mismatch
from eagle_run.decoding.config import PLAIN, SpeculativeConfig
from eagle_run.decoding.tree_spec import parse_spec
from eagle_run.engine.offline import OfflineRequest, run_offline
from eagle_run.metrics import Metrics
from eagle_run.params import SamplingParams

GREEDY = SamplingParams(temperature=0, seed=0)
SAMPLED = (
    SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2),
)


@dataclass(frozen=True)
class Plan:
    """How much of it: shares are those of the positions at which the draft is right."""

    trees: tuple[str, ...]
    shares: tuple[float, ...] = (0.5, 0.8, 0.95)
    prompt: int = 128
    tokens: int = 128
    uncaptured_tokens: int = 24
    repeats: int = 3


@dataclass
class Budget:
    """Seconds that the whole run may take, from `start` on."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)


@dataclass(frozen=True)
class Decoded:
    """One run of requests: tokens by request, counts, and the rounds on the device's clock."""

    tokens: list[tuple[int, ...]]
    metrics: Metrics
    timeline: Timeline

    @property
    def rate(self) -> float:
        """Tokens per second of all slots together, from the first round's begin to the last one's end."""
        return sum(map(len, self.tokens)) / (1e-3 * self.timeline.whole)


def decode(measured: Measured, requests: Sequence[OfflineRequest], speculative: SpeculativeConfig) -> Decoded:
    """Runs requests to their ends."""
    measured.rounds.take()
    run = run_offline(measured.engine, requests, speculative)
    return Decoded(run.token_ids, run.metrics, measured.rounds.take())


def warm(measured: Measured, requests: Sequence[OfflineRequest], speculative: SpeculativeConfig) -> Decoded:
    """Runs requests until no round is captured any more, so that a measured run only replays."""
    for _ in range(4):
        calls, captured = measured.rounds.calls, measured.rounds.captured
        done = decode(measured, requests, speculative)
        unchanged = measured.rounds.calls == calls and set(measured.rounds.captured) == set(captured)
        if unchanged or not measured.rounds.enabled:
            break
    return done


def requests_for(
    setup: Setup, plan: Plan, count: int, sampling: SamplingParams = GREEDY
) -> list[OfflineRequest]:
    """`count` requests; each samples with a seed of its own."""
    prompts = setup.prompts(count, plan.prompt)
    return [
        OfflineRequest(
            prompt, replace(sampling, seed=(sampling.seed or 0) + i, max_tokens=plan.tokens, detokenize=False)
        )
        for i, prompt in enumerate(prompts)
    ]


def equality(setup: Setup, plan: Plan, batch: int) -> dict[str, Any]:
    """Captured rounds against the same ones uncaptured, token by token; trees against plain decoding.

    The draft is the real one. Trees and plain decoding may differ where the rows of a forward round a tie
    another way; anything else is counted as a fault.
    """
    runner, _ = setup.runner(batch)
    captured, called = setup.engine(runner), setup.engine(runner, capture=False)
    found: dict[str, Any] = {"batch": batch, "captured_equal": True, "ties": 0, "faults": 0, "trees": {}}
    for label, sampling in (("greedy", GREEDY), ("sampled", SAMPLED[0])):
        requests = requests_for(setup, plan, batch, sampling)
        answers: dict[str, list[tuple[int, ...]]] = {}
        for name in ("plain", *plan.trees):
            first, second, again = (
                decode(measured, requests, SpeculativeConfig(parse_spec(name))).tokens
                for measured in (called, captured, captured)
            )
            answers[name] = first
            same = first == second == again
            found["captured_equal"] &= same
            outcomes = [
                find_mismatch(called.engine, request, plain, tree)
                for request, plain, tree in zip(requests, answers["plain"], first, strict=True)
            ]
            differing = [outcome for outcome in outcomes if outcome is not None]
            found["ties"] += sum(outcome.tie for outcome in differing)
            found["faults"] += sum(not outcome.tie for outcome in differing)
            found["trees"][f"{name} {label}"] = {
                "captured_equal": same,
                "different_from_plain": [outcome.as_dict() for outcome in differing],
            }
    found["replays"] = captured.rounds.replays
    return found


def sampling(setup: Setup, plan: Plan, batch: int) -> dict[str, Any]:
    """Temperature 1 with top-p against greedy, and another temperature without another capture."""
    runner, _ = setup.runner(batch)
    captured, called = setup.engine(runner), setup.engine(runner, capture=False)
    tree = SpeculativeConfig(parse_spec(plan.trees[-1]))
    greedy = requests_for(setup, plan, batch)
    first, second = (requests_for(setup, plan, batch, settings) for settings in SAMPLED)
    warm(captured, greedy, tree)
    warm(captured, first, tree)
    graphs = len(captured.rounds.captured)
    other = decode(captured, second, tree)
    grown = len(captured.rounds.captured) - graphs
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for _ in range(plan.repeats):
        times["greedy"].append(decode(captured, greedy, tree).timeline.round)
        times["sampled"].append(decode(captured, first, tree).timeline.round)
    return {
        "batch": batch,
        "tree": plan.trees[-1],
        "settings": [{"temperature": s.temperature, "top_p": s.top_p} for s in SAMPLED],
        "captures_for_another_temperature": grown,
        "captured_equal": other.tokens == decode(called, second, tree).tokens,
        "round_ms": {name: median(values) for name, values in times.items()},
        "captured_graphs": len(captured.rounds.captured),
        "captured_memory_bytes": captured.rounds.memory_bytes,
    }


def natural(setup: Setup, plan: Plan, batch: int) -> dict[str, Any]:
    """Trees with the real draft against plain decoding, in turns: for a trained head and real prompts."""
    runner, _ = setup.runner(batch)
    captured = setup.engine(runner)
    requests = requests_for(setup, plan, batch)
    found: dict[str, Any] = {"batch": batch, "trees": {}}
    for name in plan.trees:
        pairs = []
        speculative = SpeculativeConfig(parse_spec(name))
        for each in (PLAIN, speculative):
            warm(captured, requests, each)
        for _ in range(plan.repeats):
            pairs.append((decode(captured, requests, PLAIN), decode(captured, requests, speculative)))
        found["trees"][name] = {
            "plain_tokens_per_second": median(plain.rate for plain, _ in pairs),
            "tokens_per_second": median(tree.rate for _, tree in pairs),
            "speedup": median(tree.rate / plain.rate for plain, tree in pairs),
            "tokens_per_round": median(tree.metrics.tokens_per_round for _, tree in pairs),
        }
    return found
