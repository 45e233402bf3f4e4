"""The engine that one can drive: requests come and go between rounds. `step` is the whole story of a token.

schedule → prefill what is new → one round for all that runs (draft, verify, accept, commit) → outputs
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from eagle_run.backends.stream import on_stream, wait
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.sampling import SamplingFlags, sampling_flags, stack
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.async_output import AsyncOutput, Read, SlotOutput
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.model_runner import BatchState, ModelRunner
from eagle_run.engine.prefill import kv_bucket, prefill
from eagle_run.engine.round import run_round
from eagle_run.engine.scheduler import Scheduler
from eagle_run.engine.sequence import Request, Sequence, StoppingCriterion
from eagle_run.engine.validation import EngineLimits, check_prompt, check_speculative
from eagle_run.errors import EagleError, as_eagle_error
from eagle_run.metrics import Metrics, RoundTime, round_time, total_metrics
from eagle_run.outputs import RequestOutput
from eagle_run.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from eagle_run.bundle.loading import Bundle
    from eagle_run.tokenizer import Tokenizer

_ROUND_TIMES = 1 << 16  # rounds whose time is remembered


@dataclass(frozen=True)
class InFlightRound:
    """A round that was issued: what was in the slots then, and how to read what it emitted."""

    sequences: tuple[Sequence | None, ...]  # by slot
    speculative: SpeculativeConfig
    read: Read


class Engine:
    """Decodes requests in rounds, `runner.batch` sequences at a time.

    speculative: what a request speculates with unless it says otherwise. stop_token_ids: the model's own end
    tokens. With `async_scheduling` (the default on a GPU) the host issues a round before it reads the one
    before; that an answer ended is then noticed one round late. cuda_graphs runs the rounds: by default, on
    a GPU, as CUDA graphs. `single_thread`: torch takes one thread between the graphs, where the backend has
    threads of its own that a second pool would only be in the way of. `bundle`, `backend` and `threads` say
    what the runner's graphs are of, for those who ask.

    Not safe to call from several threads at once: `LLM` and `AsyncLLM` are.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        *,
        tokenizer: Tokenizer | None = None,
        stop_token_ids: Tokens[int] = (),
        speculative: SpeculativeConfig | None = None,
        async_scheduling: bool | None = None,
        cuda_graphs: CudaGraphRunner | None = None,
        single_thread: bool = False,
        bundle: Bundle | None = None,
        backend: str = "eager",
        threads: int = 0,
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.bundle, self.backend, self.threads = bundle, backend, threads
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self.cuda_graphs = cuda_graphs or CudaGraphRunner(runner.device)
        self.async_scheduling = runner.device.type == "cuda" if async_scheduling is None else async_scheduling
        self.metrics = Metrics()
        self.round_times: deque[RoundTime] = deque(maxlen=_ROUND_TIMES)
        self._single_thread = single_thread
        self._scheduler = Scheduler(runner.batch)
        self._requests: dict[str, list[Sequence]] = {}
        self._in_flight: deque[InFlightRound] = deque()
        self._async_output = AsyncOutput(runner.device, depth=1 + int(self.async_scheduling))
        self._states: dict[int, BatchState] = {}
        self._flags: SamplingFlags | None = None
        self._round_start = 0.0  # of the oldest round in flight
        self.speculative = SpeculativeConfig()
        self.speculate_with(speculative or SpeculativeConfig())

    @property
    def device(self) -> str:
        """ "cpu", or which GPU: "cuda:0"."""
        return str(self.runner.device)

    @property
    def default_tree(self) -> TreeShape | None:
        """The bundle's own tree; None without a draft."""
        if self.bundle is None or self.bundle.manifest.tree is None or not self.runner.has_draft:
            return None
        return self.bundle.manifest.tree.shape()

    # --- requests -----------------------------------------------------------------------------------------

    def speculate_with(self, speculative: SpeculativeConfig) -> None:
        """Makes this the default of requests to come. Raises UsageError for a tree that cannot be decoded."""
        check_speculative(self.runner, self.limits, speculative)
        self.speculative = speculative

    def add_request(
        self,
        request_id: str,
        prompt: str | Tokens[int],
        params: SamplingParams | None = None,
        *,
        speculative: SpeculativeConfig | None = None,
        stopping_criterion: Callable[[], StoppingCriterion] | None = None,
    ) -> None:
        """Takes a prompt, as text (as it is, without a chat template) or as token ids, for the next `step`.

        `stopping_criterion` makes, for every answer, a function that is shown each token and says whether the
        answer ends there. Raises EagleError for a prompt that is empty or leaves no room in the context, and
        UsageError for an id that is taken and for a tree that cannot be decoded; then nothing has changed.
        """
        params = params or SamplingParams()
        if request_id in self._requests:
            raise EagleError(
                f"there is an unfinished request {request_id!r}", hint="give every request its own id"
            )
        token_ids = self._encode(prompt)
        check_prompt(self.runner, self.limits, token_ids, params, has_text=self.tokenizer is not None)
        if speculative is not None:
            check_speculative(self.runner, self.limits, speculative)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            prompt=prompt if isinstance(prompt, str) else None,
            params=params,
            speculative=speculative or self.speculative,
            stop_token_ids=frozenset() if params.ignore_eos else self.stop_token_ids,
            stopping_criterion=stopping_criterion,
        )
        sequences = [self._sequence(request, index, each) for index, each in enumerate(_answers(params))]
        if not self._scheduler.unfinished:
            self._flags = None
        self._requests[request_id] = sequences
        for sequence in sequences:
            self._scheduler.add(sequence)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request where it is and frees its slots; gives its last output, None if it is not known."""
        sequences = self._requests.pop(request_id, None)
        if sequences is None:
            return None
        for sequence in sequences:
            if not sequence.finished:
                sequence.finish("abort")
                self._release(sequence)
        if not self._scheduler.unfinished:  # what a round in flight still brings is for nobody
            wait(self.runner.device)
            self._in_flight.clear()
        return self._output(sequences)

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.unfinished

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of the unfinished requests, the oldest first."""
        return tuple(self._requests)

    @property
    def is_idle(self) -> bool:
        """No request and no round: the runner is free for something else, such as measuring forwards."""
        return not self._scheduler.unfinished and not self._in_flight

    # --- the story of a token -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One round for everything that runs; the outputs of requests that got something new.

        With async scheduling the outputs are those of the round before. A fault in handling one request ends
        that one alone (`RequestOutput.error`). When the round itself fails, its error is raised, everything
        that was running is aborted, and the engine can go on with other requests.
        """
        with one_torch_thread() if self._single_thread else nullcontext():
            try:
                self._prefill_scheduled()
                self._launch_round()
                return self._collect_outputs()
            except BaseException:  # an interrupt too: nobody knows how far the round came
                self._abort_running()
                raise

    def _prefill_scheduled(self) -> None:
        """Free slots take waiting sequences, whose prompts go into the caches."""
        if not self._scheduler.can_schedule:
            return
        wait(self.runner.device)  # the time of a round in flight is not a prompt's
        for slot, sequence in self._scheduler.schedule():
            start = time.perf_counter()
            self._admit(slot, sequence)
            seconds = time.perf_counter() - start
            sequence.metrics.prefill_seconds += seconds
            self.metrics.prefill_seconds += seconds
            self._round_start += seconds  # not the time of the rounds in flight
        self.runner.clock.reset()

    def _admit(self, slot: int, sequence: Sequence) -> None:
        speculative = sequence.request.speculative
        state = self.state(speculative)
        prompt = sequence.request.prompt_token_ids
        with on_stream(self.runner.device):
            self._match_requests(state, speculative)
            state.sampling.put(slot, sequence.params)
            state.limit[slot] = sequence.limit
            prefill(self.runner, state, slot, prompt, chunk=self.limits.prefill_chunk)
        wait(self.runner.device)
        self.metrics.prompt_tokens += len(prompt)

    def _launch_round(self) -> None:
        """Issues one round for all slots, unless those in flight will finish every one of them."""
        speculative = self._scheduler.speculative
        sequences = tuple(each if each and each.wants_round else None for each in self._scheduler.slots)
        if speculative is None or not any(sequences):
            return
        state = self.state(speculative)
        longest = max(each.longest_length(speculative.path_rows) for each in sequences if each)
        if not self._in_flight:
            self._round_start = time.perf_counter()
        kv = kv_bucket(longest + speculative.tree.cache_rows, self.runner.cache_rows)
        alternatives = None if state.logprobs is None else state.logprobs.alternatives
        key = (speculative, state.sampling.flags, kv, self.async_scheduling, alternatives)
        round_ = partial(self._round, state, speculative, kv)
        self.cuda_graphs.run(key, round_, capture=self.runner.capturable)
        with on_stream(self.runner.device):
            read = self._async_output.send(state)
        self._in_flight.append(InFlightRound(sequences, speculative, read))
        for sequence in filter(None, sequences):
            sequence.in_flight += 1

    def _round(self, state: BatchState, speculative: SpeculativeConfig, kv: int) -> None:
        run_round(self.runner, state, speculative, kv=kv)
        if self.async_scheduling:  # the next round is issued before the host sees who is finished
            state.retire_full()

    def _collect_outputs(self) -> list[RequestOutput]:
        """Outputs of the oldest round in flight, once there are more of them than may run ahead.

        When nothing more will be issued for the sequences that are left, of all of them.
        """
        changed: dict[str, None] = {}
        while len(self._in_flight) > (int(self.async_scheduling) if self._more_rounds else 0):
            round_ = self._in_flight.popleft()
            slot_outputs = round_.read()
            timing = self._time_round()
            for sequence, slot_output in zip(round_.sequences, slot_outputs, strict=True):
                if sequence is not None and not sequence.finished:  # it may have ended in the round before
                    self._append(sequence, slot_output, round_, timing)
                    changed[sequence.request.request_id] = None
        return [output for request_id in changed if (output := self._request_output(request_id)) is not None]

    # --- what the parts need --------------------------------------------------------------------------------

    @property
    def _more_rounds(self) -> bool:
        return any(sequence.wants_round for sequence in self._scheduler.running)

    def _time_round(self) -> RoundTime:
        now = time.perf_counter()
        timing = round_time(now - self._round_start, self.runner.clock.seconds)
        self.runner.clock.reset()
        self._round_start = now
        self.round_times.append(timing)
        self.metrics.add_time(timing)
        return timing

    def _append(
        self, sequence: Sequence, slot_output: SlotOutput, round_: InFlightRound, timing: RoundTime
    ) -> None:
        emitted, drafted = len(slot_output.token_ids), round_.speculative.tree.nodes - 1
        before = sequence.metrics.tokens
        for metrics in (sequence.metrics, self.metrics):
            metrics.add_path(emitted, drafted)
        sequence.metrics.add_time(timing)
        try:
            sequence.append(slot_output)
        except Exception as error:  # of this request alone: its text, its stopping criterion
            sequence.finish("abort")
            sequence.error = as_eagle_error(error)
        self.metrics.tokens += sequence.metrics.tokens - before
        if not before:
            sequence.metrics.first_token_seconds = time.perf_counter() - sequence.request.arrival
        if sequence.finished:
            self._release(sequence)

    def _request_output(self, request_id: str) -> RequestOutput | None:
        sequences = self._requests[request_id]
        finished = all(sequence.finished for sequence in sequences)
        if finished:
            del self._requests[request_id]
        if not finished and sequences[0].params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return self._output(sequences)

    def _output(self, sequences: list[Sequence]) -> RequestOutput:
        request = sequences[0].request
        first, *others = sequences
        metrics = total_metrics(each.metrics for each in sequences) if others else first.metrics.copy()
        metrics.prompt_tokens = len(request.prompt_token_ids)
        metrics.first_token_seconds = first.metrics.first_token_seconds
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(sequence.output() for sequence in sequences),
            finished=all(sequence.finished for sequence in sequences),
            metrics=metrics,
            error=next((sequence.error for sequence in sequences if sequence.error), None),
        )

    def _release(self, sequence: Sequence) -> None:
        """Frees its slot, which computes on until another sequence takes it."""
        slot = self._scheduler.remove(sequence)
        if slot is not None:
            with on_stream(self.runner.device):
                self.state(sequence.request.speculative).retire(slot)

    def _abort_running(self) -> None:
        wait(self.runner.device)
        self._in_flight.clear()
        self._async_output = AsyncOutput(self.runner.device, depth=1 + int(self.async_scheduling))
        for request_id in {sequence.request.request_id for sequence in self._scheduler.running}:
            self.abort_request(request_id)

    def state(self, speculative: SpeculativeConfig) -> BatchState:
        """The state of rounds with such paths, always the same one: captured rounds hold its memory."""
        rows = speculative.path_rows
        if rows not in self._states:
            with on_stream(self.runner.device):
                sampling = stack([SamplingParams(temperature=0)] * self.runner.batch, self.runner.device)
                self._states[rows] = state = self.runner.new_state(rows, sampling)
                for slot in range(self.runner.batch):
                    state.retire(slot)
        return self._states[rows]

    def _match_requests(self, state: BatchState, speculative: SpeculativeConfig) -> None:
        """Rounds run the code that all requests at hand need together, so that it changes seldom."""
        at_hand = [*self._scheduler.running, *self._scheduler.waiting]
        flags = sampling_flags([sequence.params for sequence in at_hand])
        if self.cuda_graphs.enabled:  # one that is captured serves until the engine has been idle
            flags = flags if self._flags is None else flags.joined(self._flags)
            self._flags = flags
        state.sampling = replace(state.sampling, flags=flags)
        counts = [each.params.logprobs for each in at_hand if each.params.logprobs is not None]
        if not counts:
            state.logprobs = None
        elif state.logprobs is None or state.logprobs.alternatives != max(counts):
            state.logprobs = self.runner.new_logprobs(speculative.path_rows, max(counts))
        if self._async_output.depth != 1 + int(self.async_scheduling) and not self._in_flight:
            self._async_output = AsyncOutput(self.runner.device, depth=1 + int(self.async_scheduling))

    def _sequence(self, request: Request, index: int, params: SamplingParams) -> Sequence:
        return Sequence(request, index, params, max_seq_len=self.limits.max_seq_len, tokenizer=self.tokenizer)

    def _encode(self, prompt: str | Tokens[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise EagleError("this engine has no tokenizer", hint="give the prompt as token ids")
        return tuple(self.tokenizer.encode(prompt))


def _answers(params: SamplingParams) -> Iterator[SamplingParams]:
    """The parameters of each answer: answer i is that of a single request with seed + i."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    for index in range(params.n):
        yield replace(params, n=1, seed=(seed + index) % 2**63)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Between the graphs one torch thread is enough, and more would be in the backend's way.

    The operations there are on a few rows: too small to gain from being split. A pool of torch threads would
    only compete for the cores with the backend's own. What the process had set before is put back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
