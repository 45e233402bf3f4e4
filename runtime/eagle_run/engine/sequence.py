"""A sequence: one answer on its way. What the host keeps of it: how far it is, its text, when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.detokenizer import Detokenizer, StopStrings
from eagle_run.engine.async_output import SlotOutput, TokenLogprob
from eagle_run.errors import EagleError
from eagle_run.metrics import Metrics
from eagle_run.outputs import CompletionOutput, FinishReason, Logprob
from eagle_run.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from eagle_run.tokenizer import Tokenizer

StoppingCriterion = Callable[[int], bool]  # shown every token in turn; true where the answer ends


@dataclass(frozen=True)
class Request:
    """A checked request: prompt i64 tokens (template included), how to sample, what to speculate with.

    `stop_token_ids` are the model's own end tokens (none with `ignore_eos`). `stopping_criterion` makes a
    function for each answer, which may end it at any token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    speculative: SpeculativeConfig
    stop_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    stopping_criterion: Callable[[], StoppingCriterion] | None = None
    arrival: float = field(default_factory=time.perf_counter)


class Sequence:
    """Answer number `index` of a request. `params` are its own: its seed, of one answer.

    `length` tokens are known to be in the cache; `in_flight` rounds were issued and not read yet, each of
    which will add at least one.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        params: SamplingParams,
        *,
        max_seq_len: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request = request
        self.index = index
        self.params = params
        self.length = len(request.prompt_token_ids) - 1
        self.in_flight = 0
        self.metrics = Metrics()
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: EagleError | None = None
        room = max_seq_len - len(request.prompt_token_ids)
        self.room = room if params.max_tokens is None else min(room, params.max_tokens)
        self.limit = self.length + self.room
        self._reported_tokens = 0
        self._reported_text = 0
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop_strings = StopStrings(
            tuple(params.stop or ()), include_stop_str_in_output=params.include_stop_str_in_output
        )
        make = request.stopping_criterion
        self._ends_at = make() if make else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_round(self) -> bool:
        """Not if the rounds in flight will fill it for sure."""
        return not self.finished and self.room > self.in_flight

    def longest_length(self, path_rows: int) -> int:
        """The most tokens that its cache may hold when the next round begins."""
        return min(self.length + self.in_flight * path_rows, self.limit - 1)

    def append(self, output: SlotOutput) -> None:
        """Takes a round's tokens up to the first that ends the answer, and turns them into text.

        Token by token: where an answer ends must not depend on how tokens were grouped into rounds.
        """
        self.in_flight -= 1
        self.length += len(output.token_ids)
        for place, token in enumerate(output.token_ids[: self.room]):
            self.token_ids.append(token)
            self.metrics.tokens += 1
            self.room -= 1
            if self.params.logprobs is not None and output.logprobs is not None:
                self._add_logprob(token, output.logprobs[place])
            self._check_end(token)
            if self.finished:
                break
        if not self.finished and self.room == 0:
            self.finish("length")
        if self.finished:
            self._flush_text()

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def output(self) -> CompletionOutput:
        """The answer so far, or what is new of it, as its output kind says."""
        first_token = first_character = 0
        if self.params.output_kind is RequestOutputKind.DELTA:
            first_token, first_character = self._reported_tokens, self._reported_text
        self._reported_tokens, self._reported_text = len(self.token_ids), len(self.text)
        with_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text[first_character:],
            token_ids=tuple(self.token_ids[first_token:]),
            logprobs=tuple(self.logprobs[first_token:]) if with_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _check_end(self, token: int) -> None:
        """Finishes at an end token, a stop string or a stopping criterion; adds the token's text."""
        if token in self.request.stop_token_ids:
            self.finish("stop")
        elif token in (self.params.stop_token_ids or ()):
            self.finish("stop", token)
        else:
            if self._detokenizer is not None:
                self._add_text(self._detokenizer.push([token]))
            if not self.finished and self._ends_at is not None and self._ends_at(token):
                self.finish("stop")

    def _add_text(self, text: str) -> None:
        shown, stopped = self._stop_strings.push(text)
        self.text += shown
        if stopped:
            self.finish("stop", self._stop_strings.reached)

    def _flush_text(self) -> None:
        """What was held back as a possible beginning of a stop string or of a character."""
        if self._detokenizer is None or self._stop_strings.stopped:
            return
        shown, _ = self._stop_strings.push(self._detokenizer.flush())
        self.text += shown + self._stop_strings.flush()

    def _add_logprob(self, token: int, row: TokenLogprob) -> None:
        self.cumulative_logprob += row.logprob
        count = self.params.logprobs or 0
        entries = {token: Logprob(row.logprob, row.rank, self._decoded(token))}
        for rank, (other, logprob) in enumerate(row.top[:count], start=1):
            entries.setdefault(other, Logprob(logprob, rank, self._decoded(other)))
        self.logprobs.append(entries)

    def _decoded(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)
