"""What is asked and what comes back: a request, the pieces of its answer, the counts of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eagle_run.decoding.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt (token ids, template included) and how to continue it.

    Generation ends with reason "stop" at a token of `stop_tokens` (kept in the tokens, not in the text) or
    before a string of `stop_strings`, with "length" at `max_new_tokens` or the end of the context, and with
    "until" at the first token that `until()` says true to: it makes a function that is shown every token.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    until: Callable[[], Callable[[int], bool]] | None = None


@dataclass(frozen=True)
class Piece:
    """What one round gave request `index`: tokens, the text they complete, and why it ended, if it did.

    The round emitted `emitted` tokens; those behind the answer's end are not among `tokens`.
    `prefill_seconds` is what the prompt took, told with the first piece.
    """

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    emitted: int = 0
    prefill_seconds: float = 0.0


@dataclass
class Stats:
    """Counts and seconds of a run. A round counts once for every slot that was still active in it."""

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)  # reached[d]: rounds whose path has d accepted drafts
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    steps: int = 0  # rounds, each counted once whatever the batch

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

    def count(self, lengths: Sequence[int]) -> None:
        """Adds one round's path lengths (accepted drafts + 1) of the active slots."""
        for length in lengths:
            self.rounds += 1
            self.emitted += length
            self.reached += [0] * (length - len(self.reached))
            for depth in range(length):
                self.reached[depth] += 1

    def time(self, seconds: float, graphs: Mapping[str, float]) -> None:
        """Adds one round's wall time and what each graph took of it."""
        self.steps += 1
        self.decode_seconds += seconds
        self.draft_seconds += graphs.get("draft", 0.0) + graphs.get("fuse", 0.0)
        self.verify_seconds += graphs.get("target", 0.0)

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
