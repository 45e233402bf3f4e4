"""`eagle-run chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import click

from eagle_run.cli.options import note
from eagle_run.decoding.tree_spec import describe
from eagle_run.errors import EagleError
from eagle_run.llm import LLM
from eagle_run.metrics import Metrics, total_metrics
from eagle_run.params import SamplingParams

HELP = "/reset begins anew, /stats shows the figures so far, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer"
Message = dict[str, str]


@dataclass
class Chat:
    """A conversation: its messages so far and the metrics of its answers."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    runs: list[Metrics] = field(default_factory=list)

    def loop(self) -> None:
        """Reads lines until /exit or the end of the input. Raises EagleError without a chat template."""
        if self.llm.tokenizer.chat_template is None:
            raise EagleError(
                "this model has no chat template, so it cannot hold a conversation",
                hint="use `eagle-run generate --raw`",
            )
        engine = self.llm.engine
        assert engine.bundle is not None  # an LLM has one
        note(f"{engine.bundle.manifest.name}, {describe(engine.speculative.tree)}. {HELP}.")
        self.reset()
        for line in _lines():
            command = line.strip()
            if command == "/exit":
                break
            if command == "/reset":
                self.reset()
                note("a new conversation")
            elif command == "/stats":
                note(self.stats())
            elif command.startswith("/"):
                note(f"unknown command {command}: {HELP}")
            elif command:
                self.answer(line)

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str) -> None:
        """Streams the answer to `text` and adds both to the conversation.

        A message that leaves no room in the context is refused with a note, and the conversation stays as it
        was. An answer stopped with Ctrl-C is kept as far as it came.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        start, answer, finish_reason = self.llm.metrics.copy(), "", None
        try:
            prompt = self._encode(messages)
            deltas = self.llm.stream(prompt, self.params)
        except EagleError as error:
            note(str(error))
            return
        try:
            for delta in deltas:
                sys.stdout.write(delta.outputs[0].text)
                sys.stdout.flush()
                answer += delta.outputs[0].text
                finish_reason = delta.outputs[0].finish_reason
        except KeyboardInterrupt:
            note(" (stopped)")
        click.echo()
        metrics = self.llm.metrics.since(start)
        self.runs.append(metrics)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        used, most = len(prompt) + metrics.tokens, self.llm.engine.limits.max_seq_len
        if used >= most:
            note(f"(the context of {most} tokens is full: the answer ends here; /reset begins anew)")
        elif finish_reason == "length":
            note(f"(cut at {metrics.tokens} tokens: see --max-tokens)")

    def _encode(self, messages: list[Message]) -> list[int]:
        prompt = self.llm.tokenizer.encode_chat(messages)
        most = self.llm.engine.limits.max_seq_len
        if len(prompt) >= most:
            raise EagleError(
                f"the conversation would have {len(prompt)} tokens; the context holds {most}, "
                "the answer included",
                hint="/reset begins a new one, or send a shorter message",
            )
        return prompt

    def stats(self) -> str:
        """Figures over all answers so far."""
        if not self.runs:
            return "no answers yet"
        total = total_metrics(self.runs)
        return (
            f"{len(self.runs)} answers, {total.tokens} tokens at {total.tokens_per_second:.1f} tokens/s, "
            f"{total.tokens_per_round:.2f} tokens per round over {total.rounds} rounds"
        )


def _lines() -> Iterator[str]:
    """What the user types; Ctrl-C drops the line, Ctrl-D ends. Without a terminal there is no prompt."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and editing keys
    while True:
        try:
            yield input("> " if terminal else "")
        except KeyboardInterrupt:
            note("")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise EagleError("standard input is not UTF-8") from None
