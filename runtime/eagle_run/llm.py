"""LLM: what people import. Names, defaults and meanings are vLLM's where it has them.

llm = LLM("bundles/smollm2-135m-eagle3")
outputs = llm.generate(["The sky is"], SamplingParams(temperature=0.7, max_tokens=64, seed=1))
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeGuard, cast

from eagle_run.chat_template import Message
from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.tree import TreeShape, fixed_tree
from eagle_run.decoding.tree_spec import parse_tree_spec
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.engine.sequence import StoppingCriterion
from eagle_run.errors import EagleError, UsageError, as_eagle_error
from eagle_run.metrics import Metrics
from eagle_run.outputs import RequestOutput
from eagle_run.params import RequestOutputKind, SamplingParams
from eagle_run.tokenizer import Tokenizer
from eagle_run.tuning.tree_tuning import auto_tree

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Message]
Log = Callable[[str], None]


def open_engine(
    bundle: str | os.PathLike[str],
    *,
    tree: str | TreeShape = "default",
    draft: str | AcceptanceRule = AcceptanceRule.TOPK,
    backend: str = "auto",
    device: str = "auto",
    batch: int = 1,
    threads: int = 0,
    cuda_graphs: bool = True,
    async_scheduling: bool | None = None,
    tune_for: SamplingParams | None = None,
    retune: bool = False,
    log: Log | None = None,
) -> Engine:
    """The engine behind `LLM` and `AsyncLLM`, which take the same arguments.

    bundle: a folder that `eagle-export build` made. tree: what is drafted: "default" (the bundle's own),
    "auto" (the fastest here, measured once and remembered), "plain", "chain:D", "dynamic:D,K,N", a file
    or a TreeShape. draft: "topk" or "sampled" (see AcceptanceRule). backend: "auto", "onnxruntime",
    "tensorrt" or "tensorrt-rtx"; device: "auto", "cpu" or "cuda". batch: sequences decoded side by side.
    threads: inside an operator on a CPU; 0 is one per core. tune_for: what `tree="auto"` is measured with
    (greedy by default); retune measures again. log is told what the user should know.

    Raises UsageError for arguments that make no sense, and EagleError for a bad bundle or what this machine
    lacks.
    """
    rule = AcceptanceRule(_choice("draft", str(draft), [str(each) for each in AcceptanceRule]))
    asked = parse_tree_spec(tree) if isinstance(tree, str) and tree not in ("default", "auto") else tree
    if isinstance(asked, TreeShape):
        SpeculativeConfig(asked, rule)  # refused before anything is loaded
    engine = load_engine(
        bundle,
        backend=backend,
        device=device,
        batch=batch,
        threads=threads,
        with_draft=not isinstance(asked, TreeShape) or bool(asked.levels),
        cuda_graphs=cuda_graphs,
        async_scheduling=async_scheduling,
        log=log,
    )
    if asked == "auto":
        params = tune_for or SamplingParams(temperature=0)
        choice = auto_tree(engine, params=params, acceptance=rule, retune=retune, log=log or (lambda _: None))
        asked = choice.tree
    elif asked == "default":
        own = engine.default_tree or TreeShape.plain()
        asked = fixed_tree(own) if rule is AcceptanceRule.SAMPLED else own
    assert isinstance(asked, TreeShape)
    engine.speculate_with(SpeculativeConfig(asked, rule))
    return engine


class LLM:
    """A bundle that answers. Arguments are those of `open_engine`; a context manager.

    Safe to call from several threads: their requests share the batch, and each thread gets its own outputs.
    """

    def __init__(self, bundle: str | os.PathLike[str], **options: Any) -> None:
        self.engine = open_engine(bundle, **options)
        self._lock = threading.RLock()
        self._outputs: dict[str, deque[RequestOutput]] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is unfinished. Memory goes when the object does."""
        with self._lock:
            for request_id in list(self._outputs):
                self.abort(request_id)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None  # a bundle has one
        return self.engine.tokenizer

    @property
    def metrics(self) -> Metrics:
        """Counts and seconds of everything so far."""
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: SpeculativeConfig | None = None,
        progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts as they are, without a chat template; outputs are in the order of the prompts.

        A prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. sampling_params: one for
        all, or one each. speculative: in place of what the LLM was made with. progress is told of each
        request that is done.
        Raises EagleError, naming the prompt, for what cannot be decoded, before anything is. A fault that
        comes later ends one request alone: see `RequestOutput.error`.
        """
        inputs = prompt_list(prompts)
        params = [
            replace(each, output_kind=RequestOutputKind.FINAL_ONLY)
            for each in _each(sampling_params, len(inputs))
        ]
        done: dict[str, RequestOutput] = {}
        request_ids = self._add(inputs, params, speculative=speculative)
        for output in self._outputs_of(request_ids):
            done[output.request_id] = output
            if progress is not None:
                progress(output)
        return [done[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: SpeculativeConfig | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the chat template: `generate` otherwise.

        Messages are {"role": ..., "content": ...}; `template_variables` (tools, enable_thinking, …) go to the
        template. Raises EagleError where the template refuses, or there is none.
        """
        conversations: list[Any] = [messages] if is_conversation(messages) else list(messages)
        prompts = [self.tokenizer.encode_chat(each, **template_variables) for each in conversations]
        return self.generate(prompts, sampling_params, speculative=speculative)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | Messages,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        speculative: SpeculativeConfig | None = None,
        stopping_criterion: Callable[[], StoppingCriterion] | None = None,
    ) -> RequestStream:
        """Outputs as they come, each with what is new of its request; prompts as in `generate`, or messages.

        Of several prompts the outputs come mixed: `request_ids` names them. Closing the stream, or dropping
        it, ends what is unfinished. Raises EagleError at once for what cannot be decoded.
        """
        if is_conversation(prompts):
            prompts = self.tokenizer.encode_chat(prompts)
        inputs = prompt_list(prompts)
        params = [
            replace(each, output_kind=RequestOutputKind.DELTA) for each in _each(sampling_params, len(inputs))
        ]
        ids = self._add(inputs, params, request_ids, speculative, stopping_criterion)
        return RequestStream(self, self._outputs_of(ids), ids)

    def check(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> None:
        """Raises EagleError, naming the prompt, for one that `generate` would refuse. Decodes nothing."""
        with self._lock:
            for request_id in self._add(prompt_list(prompts), [params or SamplingParams()] * len(prompts)):
                self.engine.abort_request(request_id)
                del self._outputs[request_id]

    def abort(self, request_id: str) -> None:
        """Ends a request where it is; who waits for it gets its last output, with "abort"."""
        with self._lock:
            output = self.engine.abort_request(request_id)
            if output is not None and request_id in self._outputs:
                self._outputs[request_id].append(output)

    def _add(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None = None,
        speculative: SpeculativeConfig | None = None,
        stopping_criterion: Callable[[], StoppingCriterion] | None = None,
    ) -> list[str]:
        """All of them, or none: EagleError names the first prompt that cannot be decoded."""
        with self._lock:
            ids = list(request_ids or (f"request-{next(self._numbers)}" for _ in prompts))
            added: list[str] = []
            try:
                for index, (request_id, prompt, each) in enumerate(zip(ids, prompts, params, strict=True)):
                    try:
                        self.engine.add_request(
                            request_id,
                            prompt,
                            each,
                            speculative=speculative,
                            stopping_criterion=stopping_criterion,
                        )
                    except EagleError as error:
                        if len(prompts) > 1:
                            error.message = f"prompt {index}: {error.message}"
                        raise
                    added.append(request_id)
                    self._outputs[request_id] = deque()
            except BaseException:
                for request_id in added:
                    self.engine.abort_request(request_id)
                    del self._outputs[request_id]
                raise
            return ids

    def _outputs_of(self, request_ids: Sequence[str]) -> Generator[RequestOutput, None, None]:
        """Steps the engine until these requests are finished; outputs of others go to who waits for them."""
        unfinished = dict.fromkeys(request_ids)
        try:
            while unfinished:
                with self._lock:
                    ready = [
                        output for request_id in unfinished for output in _taken(self._outputs[request_id])
                    ]
                    if not ready:
                        self._step()
                for output in ready:
                    if output.finished:
                        del unfinished[output.request_id]
                    yield output
        finally:
            self.forget(request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Ends these requests where they are; nobody wants their outputs any more."""
        with self._lock:
            for request_id in request_ids:
                if self._outputs.pop(request_id, None) is not None:
                    self.engine.abort_request(request_id)

    def _step(self) -> None:
        before = set(self.engine.request_ids)
        try:
            outputs = self.engine.step()
        except BaseException as error:
            for request_id in before - set(self.engine.request_ids):
                self._deliver(failed_output(request_id, error))
            raise
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        if output.request_id in self._outputs:
            self._outputs[output.request_id].append(output)


class RequestStream:
    """An iterator over the outputs of some requests, which it ends when it is closed or dropped."""

    def __init__(
        self, llm: LLM, outputs: Generator[RequestOutput, None, None], request_ids: Sequence[str]
    ) -> None:
        self._llm, self._outputs, self._request_ids = llm, outputs, request_ids

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> RequestOutput:
        return next(self._outputs)

    def close(self) -> None:
        self._outputs.close()
        self._llm.forget(self._request_ids)  # a generator that was never asked closes without a word

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be ending
            self.close()


def failed_output(request_id: str, error: BaseException) -> RequestOutput:
    """The last output of a request whose round failed."""
    return RequestOutput(request_id, None, (), (), finished=True, error=as_eagle_error(error))


def _taken(outputs: deque[RequestOutput]) -> list[RequestOutput]:
    taken = list(outputs)
    outputs.clear()
    return taken


def _each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise UsageError(f"there are {count} prompts, but {len(sampling_params)} sampling params")
    return list(sampling_params)


def is_conversation(value: object) -> TypeGuard[Messages]:
    """Whether it is chat messages, and not a prompt or a list of either."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """One prompt or several, each as text or token ids."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts)]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [list(cast(Sequence[int], prompts))]
    return [_prompt(prompt) for prompt in cast(Sequence[Prompt], prompts)]


def _prompt(prompt: Prompt) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return str(prompt["prompt"])
        raise UsageError(
            f"a prompt with the keys {', '.join(map(repr, prompt))} cannot be read",
            hint='give {"prompt": text} or {"prompt_token_ids": ids}',
        )
    if isinstance(prompt, str):
        return prompt
    return list(prompt)


def _choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise UsageError(f"{name} should be one of {', '.join(choices)}, found {value!r}", parameters=[name])
    return value
