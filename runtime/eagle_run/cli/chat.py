"""`eagle-run chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import click

from eagle_run.bench.result import merge
from eagle_run.cli.options import note
from eagle_run.decoding.sampling import SamplingParams
from eagle_run.decoding.tree import TreeShape
from eagle_run.decoding.tree_spec import describe
from eagle_run.engine.opening import Decoded, Engine
from eagle_run.engine.request import Piece, Request, Stats
from eagle_run.errors import EagleError

HELP = "/reset begins anew, /stats shows the figures so far, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer"
Message = dict[str, str]


@dataclass
class Chat:
    """A conversation: its messages so far and the statistics of its answers."""

    engine: Engine
    shape: TreeShape
    rule: str
    sampling: SamplingParams
    max_new_tokens: int
    system: str | None = None
    stop_strings: tuple[str, ...] = ()
    messages: list[Message] = field(default_factory=list)
    runs: list[Stats] = field(default_factory=list)

    def loop(self) -> None:
        """Reads lines until /exit or the end of the input. Raises EagleError without a chat template."""
        if self.engine.text.chat_template is None:
            raise EagleError(
                "this model has no chat template, so it cannot hold a conversation",
                hint="use `eagle-run generate --raw`",
            )
        note(f"{self.engine.bundle.manifest.name}, {describe(self.shape)}. {HELP}.")
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
        said = [*self.messages, {"role": "user", "content": text}]
        try:
            request = self._request(said)
        except EagleError as error:
            note(str(error))
            return
        decoded = Decoded([], Stats(), [])
        self.runs.append(decoded.stats)
        try:
            self.engine.decode([request], self.shape, rule=self.rule, on_piece=_show, decoded=decoded)
        except KeyboardInterrupt:
            note(" (stopped)")
        click.echo()
        answer = decoded.answers[0]
        self.messages = [*said, {"role": "assistant", "content": answer.text}]
        used, most = len(request.prompt) + len(answer.tokens), self.engine.decoder.max_seq_len
        if used >= most:
            note(f"(the context of {most} tokens is full: the answer ends here; /reset begins anew)")
        elif answer.finish_reason == "length":
            note(f"(cut at {len(answer.tokens)} tokens: see --max-new-tokens)")

    def _request(self, messages: list[Message]) -> Request:
        request = self.engine.request(
            messages,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_strings=self.stop_strings,
        )
        most = self.engine.decoder.max_seq_len
        if len(request.prompt) >= most:
            raise EagleError(
                f"the conversation would have {len(request.prompt)} tokens; the context holds {most}, "
                "the answer included",
                hint="/reset begins a new one, or send a shorter message",
            )
        return request

    def stats(self) -> str:
        """Figures over all answers so far."""
        if not self.runs:
            return "no answers yet"
        total = merge(self.runs)
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


def _show(piece: Piece) -> None:
    sys.stdout.write(piece.text)
    sys.stdout.flush()
