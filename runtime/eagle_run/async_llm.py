"""AsyncLLM: the engine for asyncio, on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.errors import EagleError, UsageError, as_eagle_error
from eagle_run.llm import Messages, Prompt, failed_output, is_conversation, open_engine, prompt_list
from eagle_run.metrics import Metrics
from eagle_run.outputs import RequestOutput
from eagle_run.params import RequestOutputKind, SamplingParams
from eagle_run.tokenizer import Tokenizer


class _Consumer:
    """Who waits for a request's outputs: filled by the engine's thread, read in an event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[RequestOutput | EagleError]()

    def put(self, output: RequestOutput | EagleError) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Up to the last one; raises the error that ended the request."""
        finished = False
        while not finished:
            output = await self._queue.get()
            if isinstance(output, EagleError):
                raise output
            if output.outputs:
                yield output
            if output.error is not None:
                raise output.error
            finished = output.finished


class AsyncLLM:
    """`LLM` for asyncio: the engine runs on a thread of its own. Arguments are those of `open_engine`.

    Safe to use from several event loops and threads. Ending a consumer (a cancelled task, a closed iterator)
    ends its request, and its slot is free for the next one within a round.
    """

    def __init__(self, bundle: str | os.PathLike[str], **options: Any) -> None:
        self.engine = open_engine(bundle, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._consumers: dict[str, _Consumer] = {}
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="eagle-run engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None  # a bundle has one
        return self.engine.tokenizer

    @property
    def metrics(self) -> Metrics:
        """Counts and seconds of everything so far."""
        return self.engine.metrics

    def close(self) -> None:
        """Ends what is unfinished, and the engine's thread. Consumers get an EagleError."""
        self._commands.put(None)
        self._thread.join()

    async def generate(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        speculative: SpeculativeConfig | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; what they hold is `sampling_params.output_kind`'s to say.

        The prompt is as in `LLM.stream`: a text, token ids, a mapping, or chat messages. Raises EagleError
        for what cannot be decoded and for a fault of this request.
        """
        if not self._thread.is_alive():
            raise EagleError("this AsyncLLM is closed")
        prompts = [self.tokenizer.encode_chat(prompt)] if is_conversation(prompt) else prompt_list(prompt)
        if len(prompts) != 1:
            raise UsageError(f"{len(prompts)} prompts in one request", hint="make a request for each")
        (tokens,) = prompts
        consumer = _Consumer(request_id or f"request-{next(self._numbers)}")

        def add() -> None:
            try:
                self.engine.add_request(consumer.request_id, tokens, sampling_params, speculative=speculative)
                self._consumers[consumer.request_id] = consumer
            except Exception as error:  # whatever was given: the engine's thread goes on
                consumer.put(as_eagle_error(error))

        def abort() -> None:
            if self._consumers.get(consumer.request_id) is consumer:  # not a later request of the same name
                del self._consumers[consumer.request_id]
                self.engine.abort_request(consumer.request_id)

        self._commands.put(add)
        try:
            async for output in consumer.outputs():
                yield output
        finally:
            self._commands.put(abort)  # of what is finished nothing is left to end

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answers a conversation, through the chat template: `generate` otherwise."""
        tokens = self.tokenizer.encode_chat(messages, **template_variables)
        async for output in self.generate(tokens, sampling_params, request_id):
            yield output

    async def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` with what is new in each output."""
        params = replace(sampling_params or SamplingParams(), output_kind=RequestOutputKind.DELTA)
        async for output in self.generate(prompt, params, request_id):
            yield output

    def abort(self, request_id: str) -> None:
        """Ends a request where it is; its consumer gets its last output, with "abort"."""

        def command() -> None:
            output = self.engine.abort_request(request_id)
            consumer = self._consumers.pop(request_id, None)
            if output is not None and consumer is not None:
                consumer.put(output)

        self._commands.put(command)

    def _run(self) -> None:
        """The engine's thread: commands between rounds, rounds while there is something to decode."""
        while True:
            command = self._next_command()
            while command is not None:
                command()
                command = self._next_command()
            if self._closing:
                break
            self._step()
        for consumer in self._consumers.values():
            consumer.put(EagleError("this AsyncLLM was closed before the request was finished"))
        self._consumers.clear()

    def _next_command(self) -> Callable[[], None] | None:
        """None when it is time for a round, or to close. Waits where there is nothing to decode."""
        if self._closing:
            return None
        try:
            command = self._commands.get(block=not self.engine.has_unfinished_requests())
        except queue.Empty:
            return None
        self._closing = command is None
        return command

    def _step(self) -> None:
        before = set(self.engine.request_ids)
        try:
            outputs = self.engine.step()
        except Exception as error:
            outputs = [failed_output(name, error) for name in before - set(self.engine.request_ids)]
        for output in outputs:
            consumer = self._consumers.get(output.request_id)
            if consumer is not None:
                consumer.put(output)
            if output.finished:
                self._consumers.pop(output.request_id, None)
