"""A shard's conversations, from prompts to answers: in waves, each of which is one large batch of requests.

A wave lets the target write the user's turns that are wanted, and then answer all conversations that wait for
an answer. Everything that is drawn is a function of a conversation's seed, so that its tokens depend neither
on the others nor on the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eagle_export.data.conversation import Conversation, Record
from eagle_export.data.conversations import Prompt
from eagle_export.data.generator import Generator, Reply
from eagle_export.data.openings import Openings
from eagle_export.data.quality import is_empty, loop_criterion, without_loop
from eagle_export.data.settings import (
    ANSWER,
    PROMPTS,
    SELF_PLAY,
    TURNS,
    DataSettings,
    mixed,
    pick_temperature,
)
from eagle_export.data.variety import Excluded, Seen
from eagle_export.data.writing import write_turns
from eagle_run.engine.offline import OfflineRequest
from eagle_run.params import SamplingParams

_LEAST_ROOM = 8  # tokens that an answer must have room for


@dataclass
class Harvest:
    """What a shard gave: conversations, prompts that the target wrote for it, and why others were dropped.

    cut: answers that were kept up to the loop that they fell into.
    """

    records: list[Record] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0


@dataclass
class Host:
    """Holds conversations. `seen` are the prompts so far; those that the target writes are added."""

    generator: Generator
    settings: DataSettings
    openings: Openings
    seen: Seen
    excluded: Excluded
    on_tokens: Callable[[int], None]

    def answer_prompts(self, prompts: Sequence[tuple[int, Prompt]]) -> Harvest:
        """Answers to (index, prompt) pairs, which are free of duplicates already."""
        talks = []
        for index, prompt in prompts:
            seed = mixed(self.settings.seed, PROMPTS, index)
            talk = Conversation(seed, pick_temperature(self.settings, seed), list(prompt.turns))
            if prompt.system is not None:
                talk.messages.append({"role": "system", "content": prompt.system})
            talks.append(talk)
        return self._run(talks)

    def play(self, indices: Sequence[int]) -> Harvest:
        """Conversations whose prompts the target writes: one try for every index."""
        talks = []
        for index in indices:
            seed = mixed(self.settings.seed, SELF_PLAY, index)
            turns = 1 + mixed(seed, TURNS) % self.settings.turns
            talks.append(Conversation(seed, pick_temperature(self.settings, seed), written_turns=turns))
        return self._run(talks)

    def _run(self, talks: list[Conversation]) -> Harvest:
        harvest = Harvest()
        waiting = talks
        while waiting:
            wanting = [talk for talk in waiting if not talk.given]
            written = write_turns(self.generator, self.settings, self.openings, wanting, self.on_tokens)
            said = {id(talk): words for talk, words in zip(wanting, written, strict=True)}
            asked = [talk for talk in waiting if self._take(talk, said, harvest)]
            waiting = self._answer(asked, harvest)
        for talk in talks:
            talk.close()
            harvest.records += talk.finished
        return harvest

    def _take(self, talk: Conversation, written: dict[int, str | None], harvest: Harvest) -> bool:
        """The user's next turn goes into the conversation, or the conversation ends before it."""
        own = not talk.given
        said = written[id(talk)] if own else talk.given.pop(0)
        reason = "unfinished prompt" if said is None else self._objection(talk, said) if own else None
        if said is not None and reason is None:
            talk.ask(self.generator.text, said)
            most = self.generator.max_seq_len - _LEAST_ROOM
            if talk.turn == 0:
                most = min(most, self.settings.max_prompt_tokens)
                if own:
                    harvest.written.append(said)
            reason = "prompt too long" if len(talk.tokens) > most else None
        if reason is not None and talk.turn == 0:
            harvest.dropped[reason] += 1
        return reason is None

    def _objection(self, talk: Conversation, said: str) -> str | None:
        if self.excluded.hits(said):
            return "excluded"
        return self.seen.add(said) if talk.turn == 0 else None

    def _answer(self, talks: Sequence[Conversation], harvest: Harvest) -> list[Conversation]:
        """Lets the target answer; gives the conversations that go on."""
        requests = [
            OfflineRequest(
                tuple(talk.tokens),
                SamplingParams(
                    temperature=talk.temperature,
                    top_k=self.settings.top_k,
                    seed=mixed(talk.seed, ANSWER, talk.turn),
                    max_tokens=self.settings.max_new_tokens,
                    stop_token_ids=sorted(self.generator.stop_token_ids),
                    detokenize=False,
                ),
                None if self.settings.loops == "keep" else loop_criterion,
            )
            for talk in talks
        ]
        replies = self.generator.run(requests, self.on_tokens)
        return [talk for talk, reply in zip(talks, replies, strict=True) if self._hear(talk, reply, harvest)]

    def _hear(self, talk: Conversation, reply: Reply, harvest: Harvest) -> bool:
        """An answer goes into the conversation; whether it goes on."""
        tokens, loops = reply.tokens, self.settings.loops
        kept = tokens if loops == "keep" else without_loop(tokens)
        looped = len(kept) < len(tokens)
        reason = None
        if is_empty(self.generator.text.decode(kept)):
            reason = "empty answer"
        elif looped and loops == "drop":
            reason = "answer in a loop"
        if reason is not None:
            if talk.turn == 0:
                harvest.dropped[reason] += 1
            return False
        harvest.cut += looped
        talk.answer(self.generator.text, kept, self.generator.stop_token_ids)
        more = bool(talk.given) or talk.turn < talk.written_turns
        return more and not looped and reply.finish_reason == "stop"
