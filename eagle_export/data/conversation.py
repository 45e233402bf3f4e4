"""One conversation as it grows: the user's turns go in through the chat template, answers as sampled.

Tokens are never made from text twice: a next turn is appended to the very tokens that the target sampled, and
only what the template puts after them is encoded. Where a template rewrites what was said before (strips it,
drops the thoughts of earlier answers), the tokens of earlier answers are no longer what a chat would show, so
the conversation ends there and goes on as another one, with the rewritten history as its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle_run.errors import EagleError
from eagle_run.tokenizer import Tokenizer

Message = dict[str, str]
_MARK = "MARKOFTHETURN"


@dataclass
class Record:
    """What a shard holds of a conversation. mask: 1 for sampled tokens of answers."""

    tokens: list[int]
    mask: list[int]
    temperature: float

    @property
    def prompt_length(self) -> int:
        """Tokens before the first answer, template included."""
        return self.mask.index(1)


@dataclass
class Conversation:
    """`given` are turns of the user that are still to come; the target writes others, up to `written_turns`.

    `tokens` are the conversation so far, `mask` marks those of answers; `finished` is what became of it.
    """

    seed: int
    temperature: float
    given: list[str] = field(default_factory=list)
    written_turns: int = 0
    messages: list[Message] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    finished: list[Record] = field(default_factory=list)
    _rendered: str = ""  # what `tokens` say

    @property
    def turn(self) -> int:
        """Answers so far."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def ask(self, text: Tokenizer, said: str) -> None:
        """The user says this; `tokens` are then what the target answers."""
        self.messages.append({"role": "user", "content": said})
        full = text.render(self.messages)
        if not full.startswith(self._rendered):
            self.close()
        tail = text.encode(full[len(self._rendered) :], add_special_tokens=False)
        self.tokens += tail
        self.mask += [0] * len(tail)
        self._rendered = full

    def answer(self, text: Tokenizer, tokens: Sequence[int], stop_tokens: frozenset[int]) -> None:
        """The target has answered with these."""
        self.tokens += tokens
        self.mask += [1] * len(tokens)
        said = tokens[:-1] if tokens[-1] in stop_tokens else tokens
        content = text.decode(said, skip_special_tokens=False)
        self.messages.append({"role": "assistant", "content": content})
        self._rendered += content + text.decode(tokens[len(said) :], skip_special_tokens=False)

    def before_turn(self, text: Tokenizer) -> list[int]:
        """The tokens after which the user's next words come. Raises EagleError as `around_turn` does."""
        prefix, _ = around_turn(text, self.messages)
        if not prefix.startswith(self._rendered):
            return text.encode(prefix, add_special_tokens=False)
        return self.tokens + text.encode(prefix[len(self._rendered) :], add_special_tokens=False)

    def close(self) -> None:
        """Keeps what there is, up to the last answer, as a record, and begins anew."""
        while self.mask and not self.mask[-1]:
            self.mask.pop()
        del self.tokens[len(self.mask) :]
        if self.tokens:
            self.finished.append(Record(self.tokens, self.mask, self.temperature))
        self.tokens, self.mask, self._rendered = [], [], ""


def around_turn(text: Tokenizer, messages: Sequence[Message]) -> tuple[str, str]:
    """What the chat template writes before and after the user's next words, up to the answer."""
    rendered = text.render([*messages, {"role": "user", "content": _MARK}])
    prefix, mark, suffix = rendered.rpartition(_MARK)
    if not mark:
        raise EagleError(
            "this chat template does not show what the user says, so the target cannot write it",
            hint="give prompts",
            parameters=["prompts"],
        )
    return prefix, suffix


def end_of_turn(text: Tokenizer) -> tuple[frozenset[int], tuple[str, ...]]:
    """Tokens and texts at which a turn of the user is over, when the target writes it."""
    _, suffix = around_turn(text, [])
    first = text.encode(suffix, add_special_tokens=False)[:1] if suffix.strip() else []
    tokens = text.special_ids | frozenset(text.eos_token_ids)
    if tokens.intersection(first):
        return tokens, ()
    words = suffix.strip()
    return tokens, (words,) if words else ()
