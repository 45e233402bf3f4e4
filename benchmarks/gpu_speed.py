"""How fast rounds are: each tree against plain decoding, against its own graphs alone, against the hardware.

What is compared runs in turns, and medians are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu_decode import PLAIN, Budget, Decoded, Plan, decode, requests_for, warm
from benchmarks.gpu_measure import alone
from benchmarks.gpu_models import Measured, Setup
from benchmarks.scripted_draft import Script
from eagle_run.backends.stream import on_stream
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.decoding.tree_spec import parse_spec
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.offline import OfflineRequest
from eagle_run.engine.prefill import kv_bucket


def speed(setup: Setup, plan: Plan, batch: int, budget: Budget, rates: Mapping[str, float]) -> dict[str, Any]:
    """Everything about `batch` slots. `rates`: of the hardware, as `gpu_measure` finds them; may be empty."""
    bench = Bench.of(setup, plan, batch, rates)
    found: dict[str, Any] = {
        "batch": batch,
        "prompt_tokens": plan.prompt,
        "new_tokens": plan.tokens,
        "plain": bench.plain(),
        "trees": {},
    }
    slowest = 0.0
    for name in plan.trees:
        start = time.perf_counter()
        if budget.left < 1.2 * slowest:
            found["trees"][name] = {
                "skipped": f"{budget.left:.0f} s left, the last tree took {slowest:.0f} s"
            }
            continue
        found["trees"][name] = bench.tree(name)
        slowest = max(slowest, time.perf_counter() - start)
    found["captured_graphs"] = len(bench.captured.rounds.captured)
    found["captured_memory_bytes"] = bench.captured.rounds.memory_bytes
    return found


@dataclass(frozen=True)
class Bench:
    """One batch: a runner whose draft follows a script, with captured rounds and with called ones."""

    setup: Setup
    plan: Plan
    rates: Mapping[str, float]
    runner: ModelRunner
    script: Script
    captured: Measured
    called: Measured
    requests: list[OfflineRequest]
    texts: list[tuple[int, ...]]  # prompts with the target's own answers, which the script proposes

    @classmethod
    def of(cls, setup: Setup, plan: Plan, batch: int, rates: Mapping[str, float]) -> Bench:
        runner, script = setup.runner(batch, scripted=True)
        assert script is not None
        captured, called = setup.engine(runner), setup.engine(runner, capture=False)
        requests = requests_for(setup, plan, batch)
        answers = warm(captured, requests, PLAIN).tokens
        texts = [
            (*request.prompt_token_ids, *answer) for request, answer in zip(requests, answers, strict=True)
        ]
        return cls(setup, plan, rates, runner, script, captured, called, requests, texts)

    def plain(self) -> dict[str, Any]:
        """Plain decoding, captured and called."""
        runs = [decode(self.captured, self.requests, PLAIN) for _ in range(self.plan.repeats)]
        called = self._called(PLAIN)
        return {
            **_rounds(runs),
            "tokens_per_second": median(run.rate for run in runs),
            "uncaptured_step_ms": called.timeline.whole / len(called.timeline.inside),
            "uncaptured_equal": self._begins(called, runs[0]),
            **self._least(1, median(run.timeline.round for run in runs)),
        }

    def tree(self, name: str) -> dict[str, Any]:
        """One tree at every share, in turns with plain decoding."""
        speculative = SpeculativeConfig(parse_spec(name))
        shape = speculative.tree
        for share in self.plan.shares:
            self.script.write(self.texts, share)
            warm(self.captured, self.requests, speculative)
        plain: list[Decoded] = []
        runs: dict[float, list[Decoded]] = {share: [] for share in self.plan.shares}
        for _ in range(self.plan.repeats):
            plain.append(decode(self.captured, self.requests, PLAIN))
            for share in self.plan.shares:
                self.script.write(self.texts, share)
                runs[share].append(decode(self.captured, self.requests, speculative))
        called = self._called(speculative)
        everything = [run for some in runs.values() for run in some]
        found = _rounds(everything)
        graphs = self._graphs(shape)
        step = median(run.timeline.round for run in plain)
        return {
            **found,
            **graphs,
            "round_over_graphs": found["round_ms"] / graphs["graphs_in_a_row_ms"],
            "uncaptured_round_ms": called.timeline.whole / len(called.timeline.inside),
            "uncaptured_equal": self._begins(called, runs[self.plan.shares[-1]][0]),
            "plain_step_ms": step,
            "break_even_tokens_per_round": found["round_ms"] / step,
            "equal_to_plain": _share_equal(everything, plain[0]),
            "runs": [
                {
                    "share": share,
                    "tokens_per_round": median(run.metrics.tokens_per_round for run in some),
                    "tokens_per_second": median(run.rate for run in some),
                    "speedup": median(a.rate / b.rate for a, b in zip(some, plain, strict=True)),
                }
                for share, some in runs.items()
            ],
            **self._least(shape.nodes, graphs["verify_ms"]),
        }

    def _called(self, speculative: SpeculativeConfig) -> Decoded:
        """A short run without captures, after one that loads what it needs."""
        short = [request.shortened(self.plan.uncaptured_tokens) for request in self.requests]
        decode(self.called, short, speculative)
        return decode(self.called, short, speculative)

    def _begins(self, short: Decoded, run: Decoded) -> bool:
        """Whether every answer of `run` begins with that of `short`."""
        return all(
            a == b[: len(a)] and len(a) == self.plan.uncaptured_tokens
            for a, b in zip(short.tokens, run.tokens, strict=True)
        )

    def _graphs(self, shape: TreeShape) -> dict[str, float]:
        """The forwards of a round, each alone, and one after another with nothing between."""
        runner, state = self.runner, self.captured.engine.state(SpeculativeConfig(shape))
        kv = kv_bucket(self.plan.prompt + self.plan.tokens // 2 + shape.cache_rows, runner.cache_rows)
        with on_stream(self.setup.device):
            prime = runner.draft(shape.depth + 1, 1, kv)
            levels = [runner.draft(level.width, level.width, kv) for level in shape.levels[1:]]
            verify = runner.target(shape.nodes, shape.nodes, kv)
            for forward in (prime, *levels, verify):
                forward.inputs["tree_mask"][..., 0] = True  # a new buffer shows nothing, which would be NaN

        def in_a_row() -> None:
            runner.fuse(state.pending_features)
            for forward in (prime, *levels, verify):
                forward.run()

        functions: dict[str, Callable[[], Any]] = {
            "fuse": lambda: runner.fuse(state.pending_features),
            "prime": prime.run,
            "verify": verify.run,
            "in_a_row": in_a_row,
        }
        functions |= {f"level{i}": level.run for i, level in enumerate(levels)}
        times = alone(self.setup.device, functions, times=7 + 4 * self.plan.repeats)
        in_a_row_ms = times.pop("in_a_row")
        return {
            "verify_ms": times["verify"],
            "draft_ms": sum(times.values()) - times["verify"],
            "graphs_alone_ms": sum(times.values()),
            "graphs_in_a_row_ms": in_a_row_ms,
        }

    def _least(self, rows: int, found: float) -> dict[str, float]:
        """The least ms that a target forward of `rows` rows a slot can take, and what share of ours that is.

        Either all weights are read, at the rate of a copy, or all products are computed, at that of a large
        one; attention and caches come on top and are left out.
        """
        if not self.rates or not self.setup.target_bytes:
            return {}
        weights = self.setup.target_bytes / self.setup.weight_bytes
        products = 2 * weights * rows * self.runner.batch / self.rates["product_per_second"]
        least = 1e3 * max(self.setup.target_bytes / self.rates["copy_bytes_per_second"], products)
        return {"least_ms": least, "share_of_least": least / found}


def _rounds(runs: list[Decoded]) -> dict[str, Any]:
    """What rounds of one shape took: ms of one, ms from its begin to the next one's, what share is busy."""
    times = [run.timeline for run in runs]
    return {
        "round_ms": median(time.round for time in times),
        "wall_ms_per_round": median(time.whole / len(time.inside) for time in times),
        "busy": median(time.busy for time in times),
        "rounds": sum(len(time.inside) for time in times),
    }


def _share_equal(runs: list[Decoded], plain: Decoded) -> float:
    """Share of answers that are plain decoding's, token by token."""
    pairs = [pair for run in runs for pair in zip(run.tokens, plain.tokens, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)
