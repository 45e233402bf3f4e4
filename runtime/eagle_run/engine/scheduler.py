"""The host's side of decoding: which job is in which slot, which rounds are under way, what is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from eagle_run.backends.stream import on_stream, wait
from eagle_run.decoding.sampling import switches
from eagle_run.decoding.tree import TreeShape
from eagle_run.detokenizer import Detokenizer, StopStrings
from eagle_run.engine.async_output import Handover, Read
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.model_runner import BatchState, ModelRunner
from eagle_run.engine.prefill import kv_bucket, prefill
from eagle_run.engine.request import Piece, Request, Stats
from eagle_run.engine.round import step
from eagle_run.errors import EagleError
from eagle_run.tokenizer import Tokenizer


class Job:
    """What the host keeps of a request: how far its answer is, its text, and when it is over.

    `length` tokens are known to be in the cache; `under_way` rounds were issued and not read yet, each of
    which will add at least one.
    """

    def __init__(self, index: int, request: Request, max_seq_len: int, text: Tokenizer | None) -> None:
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.length = len(request.prompt) - 1
        self.under_way = 0
        self.prefill_seconds = 0.0
        self.room = min(request.max_new_tokens, max_seq_len - len(request.prompt))
        self.limit = self.length + self.room
        self._detokenizer = Detokenizer(text) if text else None
        self._stop = StopStrings(request.stop_strings)
        self._until = request.until() if request.until else None

    @property
    def wants_a_round(self) -> bool:
        """Not if the rounds under way will fill it for sure."""
        return self.finish_reason is None and self.room > self.under_way

    def longest(self, path_rows: int) -> int:
        """The most tokens that its cache may hold when the next round begins."""
        return min(self.length + self.under_way * path_rows, self.limit - 1)

    def take(self, tokens: Sequence[int]) -> Piece:
        """Keeps a round's tokens up to the first that ends the answer, and turns them into text.

        Token by token: where a stop string ends must not depend on how tokens were grouped into rounds.
        """
        self.under_way -= 1
        self.length += len(tokens)
        kept: list[int] = []
        text = ""
        for token in tokens[: self.room]:
            kept.append(token)
            if token in self.request.stop_tokens:
                self.finish_reason = "stop"
            else:
                text += self._text(token)
                if self.finish_reason is None and self._until and self._until(token):
                    self.finish_reason = "until"
            if self.finish_reason is not None:
                break
        self.room -= len(kept)
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._rest()
        prefill_seconds, self.prefill_seconds = self.prefill_seconds, 0.0
        return Piece(self.index, tuple(kept), text, self.finish_reason, len(tokens), prefill_seconds)

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


@dataclass(frozen=True)
class Round:
    """A round under way: what was in the slots when it was issued, and how to read what it emitted."""

    jobs: tuple[Job | None, ...]  # by slot
    read: Read


class Slots:
    """Jobs on their way through the slots of a runner.

    `ahead` is how many rounds may be under way while the host looks at the one before them. All jobs share
    the code that their sampling settings need together, so that rounds do not change as slots do.
    """

    def __init__(
        self,
        runner: ModelRunner,
        state: BatchState,
        rounds: CudaGraphRunner,
        jobs: Sequence[Job],
        shape: TreeShape,
        *,
        rule: str,
        stats: Stats,
        chunk: int,
        ahead: int,
    ) -> None:
        self._runner = runner
        self._state = state
        self._rounds = rounds
        self._shape = shape
        self._rule = rule
        self._stats = stats
        self._chunk = chunk
        self._ahead = ahead
        self._waiting = deque(jobs)
        self._jobs: list[Job | None] = [None] * runner.batch
        self._under_way: deque[Round] = deque()
        self._handover = Handover(runner.device, depth=ahead + 1)
        self._mark = 0.0  # where the time of the oldest round under way begins
        runner.runs += 1
        self._run = runner.runs
        with on_stream(runner.device):
            state.settings = replace(
                state.settings, switches=switches([job.request.sampling for job in jobs])
            )
            for slot in range(runner.batch):  # an earlier run may have been left in the middle
                state.retire(slot)

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or any(self._jobs)

    def fill(self) -> None:
        """Gives free slots to waiting jobs, whose prompts go into the caches.

        Raises EagleError if another run has begun in this runner: the caches are no longer this one's.
        """
        self._check_last()
        if not self._waiting or all(self._jobs):
            return
        wait(self._runner.device)  # the time of a round under way is not a prompt's
        for slot, occupant in enumerate(self._jobs):
            if occupant is None and self._waiting:
                self._jobs[slot] = job = self._waiting.popleft()
                start = time.perf_counter()
                self._admit(slot, job)
                job.prefill_seconds = time.perf_counter() - start
                self._stats.prefill_seconds += job.prefill_seconds
                self._mark += job.prefill_seconds  # not the time of the rounds under way
        self._runner.clock.reset()

    def launch(self) -> None:
        """Issues one round for all slots, unless those under way will finish every one of them."""
        jobs = tuple(job if job and job.wants_a_round else None for job in self._jobs)
        longest = max((job.longest(self._shape.depth + 1) for job in jobs if job), default=None)
        if longest is None:
            return
        if not self._under_way:
            self._mark = time.perf_counter()
        kv = kv_bucket(longest + self._shape.cache_rows, self._runner.cache_rows)
        key = (self._shape, self._rule, self._state.settings.switches, kv, self._ahead)
        self._rounds.run(key, partial(self._round, kv), capture=self._runner.capturable)
        with on_stream(self._runner.device):
            read = self._handover.send(self._state.report)
        self._under_way.append(Round(jobs, read))
        for job in filter(None, jobs):
            job.under_way += 1

    def collect(self) -> Iterator[Piece]:
        """The pieces of the oldest round under way, once there are more of them than may run ahead.

        When nothing more will be issued for the jobs that are left, of all of them.
        """
        while len(self._under_way) > (self._ahead if self._more_to_issue else 0):
            round_ = self._under_way.popleft()
            emitted = round_.read()
            now = time.perf_counter()
            self._stats.time(now - self._mark, self._runner.clock.seconds)
            self._runner.clock.reset()
            self._mark = now
            for slot, (job, tokens) in enumerate(zip(round_.jobs, emitted, strict=True)):
                if job is not None and job.finish_reason is None:  # it may have ended in the round before
                    yield self._take(slot, job, tokens)

    @property
    def _more_to_issue(self) -> bool:
        return any(job and job.wants_a_round for job in self._jobs)

    def _check_last(self) -> None:
        if self._runner.runs != self._run:
            raise EagleError(
                "this run cannot go on: another one has begun in the same session",
                hint="let a run end, or leave it for good, before the next one begins",
            )

    def _round(self, kv: int) -> None:
        step(self._runner, self._state, self._shape, kv=kv, rule=self._rule)
        if self._ahead:  # the next round is issued before the host sees who is finished
            self._state.retire_full()

    def _admit(self, slot: int, job: Job) -> None:
        state, request = self._state, job.request
        with on_stream(self._runner.device):
            state.settings.put(slot, request.sampling)
            state.limit[slot] = job.limit
            prefill(self._runner, state, slot, request.prompt, chunk=self._chunk)
        wait(self._runner.device)
        self._stats.prompt_tokens += len(request.prompt)

    def _take(self, slot: int, job: Job, tokens: Sequence[int]) -> Piece:
        self._check_last()  # the caller may have begun another since the last piece
        self._stats.count([len(tokens)])
        piece = job.take(tokens)
        self._stats.tokens += len(piece.tokens)
        if piece.finish_reason is not None:
            with on_stream(self._runner.device):
                self._state.retire(slot)
            self._jobs[slot] = None
        return piece
