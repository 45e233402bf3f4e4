"""generate(): prompts in, text and tokens out, round by round. Plain decoding is the tree with one node."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eagle_run.accept import Path
from eagle_run.errors import EagleError, UsageError
from eagle_run.prefill import kv_bucket, prefill
from eagle_run.sampling import SamplingSettings, stack
from eagle_run.session import Session
from eagle_run.step import step
from eagle_run.text import Detokenizer, StopStrings, Text
from eagle_run.tree import TreeShape


@dataclass(frozen=True)
class Request:
    """One prompt (token ids, template included) and how to continue it.

    Generation ends with reason "stop" at a token of `stop_tokens` (kept in the tokens, not in the text) or
    before a string of `stop_strings`, and with "length" at `max_new_tokens` or the end of the context.
    """

    prompt: tuple[int, ...]
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one round gave request `index`: tokens, the text they complete, and why it ended, if it did."""

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


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
    steps: int = 0

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
        """Mean milliseconds of a round by phase; `glue_ms` is all that happens outside the graphs."""
        steps = max(self.steps, 1)
        glue = self.decode_seconds - self.draft_seconds - self.verify_seconds
        return {
            "draft_ms": 1e3 * self.draft_seconds / steps,
            "verify_ms": 1e3 * self.verify_seconds / steps,
            "glue_ms": 1e3 * glue / steps,
        }


class Decoder:
    """Runs requests through a session in lock-step rounds, `session.batch` of them at a time.

    `text` turns tokens into text as they come; without it pieces carry tokens only. `max_nodes` is the
    largest tree that the graphs were built for; None leaves it to the room in the caches.
    """

    def __init__(
        self,
        session: Session,
        *,
        max_seq_len: int,
        chunk: int,
        text: Text | None = None,
        max_nodes: int | None = None,
    ) -> None:
        self.session = session
        self.max_nodes = max_nodes
        self.max_seq_len = max_seq_len
        self.chunk = chunk
        self.text = text

    def generate(
        self, requests: Sequence[Request], shape: TreeShape, *, rule: str = "topk", stats: Stats | None = None
    ) -> Iterator[Piece]:
        """Yields pieces as rounds finish; the last piece of each request carries its finish reason.

        `rule` is how children are drafted and accepted: "topk" (the k most likely; draw x ~ p and follow) or
        "sampled" (drawn from q without replacement; rejection sampling). Both emit exactly p.
        Raises EagleError for what `check` refuses, before anything is computed.
        """
        self.check(requests, shape, rule=rule)
        stats = stats if stats is not None else Stats()
        for first in range(0, len(requests), self.session.batch):
            group = requests[first : first + self.session.batch]
            yield from self._generate_group(group, first, shape, rule, stats)

    def _generate_group(
        self, group: Sequence[Request], first: int, shape: TreeShape, rule: str, stats: Stats
    ) -> Iterator[Piece]:
        session = self.session
        slots = [_Slot(first + i, request, self) for i, request in enumerate(group)]
        # Slots without a request repeat the first prompt, inactive: lock-step shapes do not depend on them.
        padded = [slots[i] if i < len(slots) else slots[0] for i in range(session.batch)]
        settings = stack([slot.request.sampling for slot in padded], session.device)
        state = session.new_state(shape.depth + 1, settings)

        start = time.perf_counter()
        prefill(session, state, [slot.request.prompt for slot in padded], chunk=self.chunk)
        stats.prefill_seconds += time.perf_counter() - start
        stats.prompt_tokens += sum(len(request.prompt) for request in group)
        for i in range(len(slots), session.batch):
            state.retire(i)

        lengths = [len(slot.request.prompt) - 1 for slot in slots]
        while any(slot.finish_reason is None for slot in slots):
            session.clock.reset()
            start = time.perf_counter()
            kv = kv_bucket(max(lengths) + shape.cache_rows, session.cache_rows)
            path = step(session, state, shape, kv=kv, rule=rule)
            emitted = _read(path)
            stats.time(time.perf_counter() - start, session.clock.seconds)
            for i, slot in enumerate(slots):
                if slot.finish_reason is not None:
                    continue
                stats.count([len(emitted[i])])
                lengths[i] += len(emitted[i])
                piece = slot.take(emitted[i])
                stats.tokens += len(piece.tokens)
                if piece.finish_reason is not None:
                    state.retire(i)
                    lengths[i] = 0
                yield piece

    def check(self, requests: Sequence[Request], shape: TreeShape, *, rule: str = "topk") -> None:
        """Can all of this be decoded? Costs nothing, and names a request by its place in `requests`.

        Raises EagleError for an empty prompt or one that leaves no room in the context, and UsageError for a
        tree that does not go with the bundle or the rule.
        """
        for index, request in enumerate(requests):
            if not request.prompt:
                raise EagleError(f"prompt {index} is empty", hint="give at least one token")
            if len(request.prompt) >= self.max_seq_len:
                raise EagleError(
                    f"prompt {index} has {len(request.prompt)} tokens; the bundle's context is "
                    f"{self.max_seq_len}, the answer included",
                    hint="shorten the prompt, or build the bundle with a larger --max-seq-len",
                )
            if request.max_new_tokens < 1:
                raise UsageError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        self._check_rows(shape)
        if shape.kind == "dynamic" and rule == "sampled":
            raise UsageError(
                "sampled drafts need a tree that is fixed before they are drawn, and a dynamic one is not",
                hint="take a static tree or a chain, or the rule topk",
            )
        if shape.levels and not self.session.has_draft:
            raise UsageError(
                "this bundle has no draft head, so only plain decoding is possible",
                hint="use --tree plain, or build the bundle with --head",
            )

    def _check_rows(self, shape: TreeShape) -> None:
        """The tree must not pass what the bundle was built for, nor what one forward writes the caches."""
        if self.max_nodes is not None and shape.nodes > self.max_nodes:
            raise UsageError(
                f"this tree has {shape.nodes} nodes, the root included; the bundle was built for "
                f"{self.max_nodes}",
                hint="take a smaller tree, or build the bundle with a larger --max-tree-nodes",
            )
        there, behind = self.session.cache_rows, max(self.chunk, shape.cache_rows)
        if self.max_seq_len + behind <= there:
            return
        found = f"{self.max_seq_len + behind} cache rows; the bundle's graphs have {there}"
        if shape.cache_rows == behind:
            raise UsageError(
                f"this tree needs {found}",
                hint="take a smaller tree, or build the bundle with a larger --max-tree-nodes",
            )
        raise UsageError(
            f"prefill in chunks of {self.chunk} tokens needs {found}",
            hint="take smaller chunks, or build the bundle again with this chunk",
        )


class _Slot:
    """What the host keeps of a request: its tokens so far, its text, and when it is over."""

    def __init__(self, index: int, request: Request, decoder: Decoder) -> None:
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.room = min(request.max_new_tokens, decoder.max_seq_len - len(request.prompt))
        self._detokenizer = Detokenizer(decoder.text) if decoder.text else None
        self._stop = StopStrings(request.stop_strings)

    def take(self, tokens: Sequence[int]) -> Piece:
        """Keeps a round's tokens up to the first that ends the answer, and turns them into text.

        Token by token: where a stop string ends must not depend on how tokens were grouped into rounds.
        """
        kept: list[int] = []
        text = ""
        for token in tokens[: self.room]:
            kept.append(token)
            if token in self.request.stop_tokens:
                self.finish_reason = "stop"
            else:
                text += self._text(token)
            if self.finish_reason is not None:
                break
        self.room -= len(kept)
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._rest()
        return Piece(self.index, tuple(kept), text, self.finish_reason)

    def _text(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        text, stopped = self._stop.push(self._detokenizer.push([token]))
        if stopped:
            self.finish_reason = "stop"
        return text

    def _rest(self) -> str:
        """What was held back as a possible beginning of a stop string or of a character."""
        if self._detokenizer is None or self._stop.stopped:
            return ""
        text, _ = self._stop.push(self._detokenizer.flush())
        return text + self._stop.flush()


def _read(path: Path) -> list[list[int]]:
    """The host's one read of a round: the emitted tokens of every slot."""
    return [
        tokens[:length] for tokens, length in zip(path.tokens.tolist(), path.length.tolist(), strict=True)
    ]
