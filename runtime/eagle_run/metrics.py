"""Every statistic of decoding, once: what the API returns is what the command lines print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round; `glue` is all that is outside the graphs, or everything if they are not timed."""

    draft: float
    verify: float
    glue: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.glue


@dataclass
class Metrics:
    """Counts and seconds of a request, or of all requests of an engine.

    prompt_tokens, cached_prompt_tokens: of the prompts, and how many of them needed no forward.
    tokens: delivered. rounds: target verifications, each counted once for every sequence in it.
    emitted: tokens that rounds emitted, those behind an answer's end included. drafted: proposed tokens.
    reached[d]: rounds whose path has d accepted drafts. steps: rounds, each counted once whatever the batch.
    prefill_seconds, decode_seconds: wall time; rounds are shared by the sequences in them. draft_seconds,
    verify_seconds: of decode_seconds, inside the draft's graphs and the target's, where those are timed.
    first_token_seconds: from the arrival of a request to its first token; 0 for an engine.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    reached: list[int] = field(default_factory=list)
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target kept: every round emits one token more."""
        return self.emitted - self.rounds

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens over decoding time; prefill is reported apart."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted per verification, the bonus token included (τ of the EAGLE papers)."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """[d - 1]: of the rounds whose path reached depth d - 1, the share that reached d."""
        return [
            after / before if before else 0.0
            for before, after in zip(self.reached, self.reached[1:], strict=False)
        ]

    def add_path(self, emitted: int, drafted: int) -> None:
        """Adds one round of one sequence: tokens emitted (accepted drafts + 1), of `drafted` proposed."""
        self.rounds += 1
        self.emitted += emitted
        self.drafted += drafted
        self.reached += [0] * (emitted - len(self.reached))
        for depth in range(emitted):
            self.reached[depth] += 1

    def add_time(self, time: RoundTime) -> None:
        """Adds the seconds of one round."""
        self.steps += 1
        self.decode_seconds += time.total
        self.draft_seconds += time.draft
        self.verify_seconds += time.verify

    def copy(self) -> Metrics:
        return replace(self, reached=list(self.reached))

    def since(self, earlier: Metrics) -> Metrics:
        """What came after `earlier`, a copy of these metrics as they were."""
        later = Metrics()
        for name in _COUNTS:
            setattr(later, name, getattr(self, name) - getattr(earlier, name))
        padded = earlier.reached + [0] * (len(self.reached) - len(earlier.reached))
        later.reached = [now - then for now, then in zip(self.reached, padded, strict=True)]
        while later.reached and not later.reached[-1]:
            later.reached.pop()
        return later

    def phases(self) -> dict[str, float]:
        """Mean milliseconds of a round by phase; `glue_ms` is all that happens outside the graphs.

        Only `round_ms` where graphs are not timed one by one (see `ModelRunner.timed`).
        """
        steps = max(self.steps, 1)
        if not self.verify_seconds:
            return {"round_ms": 1e3 * self.decode_seconds / steps}
        glue = self.decode_seconds - self.draft_seconds - self.verify_seconds
        return {
            "draft_ms": 1e3 * self.draft_seconds / steps,
            "verify_ms": 1e3 * self.verify_seconds / steps,
            "glue_ms": 1e3 * glue / steps,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data: counts, rates, acceptance, and mean milliseconds of a round by phase."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 3),
            "tokens_per_round": round(self.tokens_per_round, 4),
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_by_depth": [round(share, 4) for share in self.acceptance_by_depth],
            "prefill_seconds": round(self.prefill_seconds, 4),
            "decode_seconds": round(self.decode_seconds, 4),
            "first_token_seconds": round(self.first_token_seconds, 4),
            **{name: round(value, 3) for name, value in self.phases().items()},
        }


_COUNTS = tuple(each.name for each in fields(Metrics) if each.name != "reached")


def total_metrics(parts: Iterable[Metrics]) -> Metrics:
    """The counts and seconds of several requests or runs as if they were one."""
    total = Metrics()
    for part in parts:
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.reached += [0] * (len(part.reached) - len(total.reached))
        for depth, count in enumerate(part.reached):
            total.reached[depth] += count
    return total


def round_time(seconds: float, graphs: Mapping[str, float]) -> RoundTime:
    """A round's wall time, divided by what each graph ("draft", "fuse", "target") took of it."""
    draft = graphs.get("draft", 0.0) + graphs.get("fuse", 0.0)
    verify = graphs.get("target", 0.0)
    return RoundTime(draft, verify, seconds - draft - verify)
