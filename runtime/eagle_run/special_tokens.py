"""Tells the control tokens that a chat template writes from the same text in a message, which is text.

A user may type "<|im_end|>". Were it encoded as that token, it would end the user's turn. So a conversation
is rendered twice: as it is, and with a marker of digits inside each special token that a message spells out,
and where a message's edge could complete one that the template begins. The markers show which occurrences
come from messages. The others are given names that nobody can type, and a copy of the tokenizer that knows
its special tokens under these names only encodes the whole in one go: all else, such as how text is split
into words beside a special token, is as ever.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from eagle_run.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

Values = dict[str, Any]
Chat = list[dict[str, Any]]
Span = tuple[int, int]
Render = Callable[[Chat, Values], str]


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as a chat template writes it.

    `control_spans` are (begin, end) of the special tokens that are the template's own, ascending; None when
    all in `text` are.
    """

    text: str
    control_spans: tuple[Span, ...] | None = None

    def head(self, end: int) -> RenderedChat:
        """Up to character `end`."""
        spans = self.control_spans
        if spans is not None:
            spans = tuple(span for span in spans if span[1] <= end)
        return RenderedChat(self.text[:end], spans)

    def tail(self, begin: int) -> RenderedChat:
        """From character `begin` on."""
        spans = self.control_spans
        if spans is not None:
            spans = tuple((start - begin, end - begin) for start, end in spans if start >= begin)
        return RenderedChat(self.text[begin:], spans)


class SpecialTokens:
    """The special tokens of a tokenizer as text: where they occur, and encoding some of them as plain text.

    They are the added tokens that the tokenizer calls special, and those that end an answer, of two
    characters or more (one character cannot be kept apart from text).
    """

    def __init__(self, tokenizer: BackendTokenizer, end_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if (token.special or token_id in end_ids) and len(token.content) > 1
        }
        self._others = {token.content for token in added.values()} - self._ids.keys()
        self._renamed: _RenamedTokenizer | None = None

    def render(self, render: Render, messages: Chat, variables: Values) -> RenderedChat:
        """What `render` makes of a conversation, with what is special in messages and variables kept apart.

        Raises UsageError when the template changes special-token text of a message, so that it cannot be told
        which special tokens are whose.
        """
        text = render(messages, variables)
        spoken = [value for message in messages for key, value in message.items() if key != "role"]
        texts = list(_texts([*spoken, variables]))
        spelled = next((found[0] for each in texts if (found := self._special_pattern.search(each))), None)
        edges = any(self._edges(value) for value in spoken if isinstance(value, str))
        whole = RenderedChat(text, self._unmarked_spans(text, ()) if self._is_disguised(texts) else None)
        if spelled is None and not edges:
            return whole
        marker = _marker(json.dumps([text, messages, variables]))
        for with_edges in (True, False) if edges else (False,):
            marked = [self._marked_message(message, marker, with_edges) for message in messages]
            pieces = render(marked, self._marked(variables, marker)).split(marker)
            if "".join(pieces) == text:
                marks = tuple(accumulate(map(len, pieces[:-1])))
                spans = self._unmarked_spans(text, marks)
                return whole if spans == self._unmarked_spans(text, ()) else RenderedChat(text, spans)
        if spelled is None:
            return whole
        raise UsageError(
            f"a message holds the text of a special token, {spelled!r}, and the chat template changes it, so "
            "it cannot be kept apart from the template's own",
            hint="leave it out of the message, or let it be a special token",
            parameters=["split_special_tokens"],
        )

    def encode(self, chat: RenderedChat, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids; special tokens outside `control_spans` are spelled out."""
        if chat.control_spans is None:
            ids: list[int] = self._tokenizer.encode(chat.text, add_special_tokens=add_special_tokens).ids
            return ids
        if self._renamed is None or self._renamed.nonce in chat.text:
            self._renamed = _RenamedTokenizer(self._tokenizer, self._ids)
        return self._renamed.encode(chat.text, chat.control_spans, add_special_tokens=add_special_tokens)

    # --- where special tokens occur ---------------------------------------------------------------------

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Any added token, the longest first: as tokenizers match them."""
        return _alternation([*self._ids, *self._others])

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _alternation(self._ids)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(token[:size] for token in self._ids for size in range(1, len(token)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(token[size:] for token in self._ids for size in range(1, len(token)))

    @cached_property
    def _all_tokens(self) -> str:
        return "\0".join(self._ids)

    def _is_disguised(self, texts: Sequence[str]) -> bool:
        """Does the tokenizer's normalizer (lower case, compatibility forms) make a special token of one?"""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return False
        return any(
            self._special_pattern.search(normalizer.normalize_str(text)) is not None
            for text in texts
            if self._special_pattern.search(text) is None
        )

    def _edges(self, text: str) -> set[int]:
        """Where in `text` one could be completed by what a template writes around it; blanks are trimmed."""
        core = text.strip()
        begin = len(text) - len(text.lstrip())
        end = begin + len(core)
        if not core:
            return set()
        if core in self._all_tokens:
            return {begin, end}
        longest = min(len(core), max(map(len, self._ids), default=1) - 1)
        sizes = range(1, longest + 1)
        first = {begin} if any(core[:size] in self._endings for size in sizes) else set()
        last = {end} if any(core[-size:] in self._beginnings for size in sizes) else set()
        return first | last

    def _unmarked_spans(self, text: str, marks: Sequence[int]) -> tuple[Span, ...]:
        """Special tokens of `text` with no mark inside."""
        spans = []
        at = 0
        while found := self._pattern.search(text, at):
            begin, end = found.span()
            # A mark inside the longest one leaves shorter ones that begin there.
            ends = [end] if not _inside(marks, begin, end) else self._shorter_ends(text, begin, end)
            end = next((end for end in ends if not _inside(marks, begin, end)), begin)
            if text[begin:end] in self._ids:
                spans.append((begin, end))
            at = max(end, begin + 1)
        return tuple(spans)

    def _shorter_ends(self, text: str, begin: int, end: int) -> list[int]:
        tokens = self._ids.keys() | self._others
        return [stop for stop in range(end - 1, begin, -1) if text[begin:stop] in tokens]

    # --- marking ----------------------------------------------------------------------------------------

    def _marked_message(self, message: Mapping[str, Any], marker: str, with_edges: bool) -> dict[str, Any]:
        """A message with its texts marked; its role is one that the template knows."""
        return {
            key: value
            if key == "role"
            else self._marked_text(value, marker, self._edges(value) if with_edges else set())
            if isinstance(value, str)
            else self._marked(value, marker)
            for key, value in message.items()
        }

    def _marked(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, marker, set())
        if isinstance(value, list):
            return [self._marked(item, marker) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, marker): self._marked(item, marker) for key, item in value.items()}
        return value

    def _marked_text(self, text: str, marker: str, places: set[int]) -> str:
        """The text with a marker inside each special token, however they overlap, and at `places`."""
        at, inside = 0, set()
        while found := self._special_pattern.search(text, at):
            at = found.start() + 1
            inside.add(at)
        borders = [0, *sorted(inside | places), len(text)]
        return marker.join(text[begin:end] for begin, end in pairwise(borders))


class _RenamedTokenizer:
    """A copy of a tokenizer whose special tokens have names that occur in no text: `nonce` is random."""

    def __init__(self, tokenizer: BackendTokenizer, special: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer as BackendTokenizer

        self.nonce = secrets.token_hex(8)
        # Brackets and digits: no normalizer changes them.
        self._names = {token: f"⟦{self.nonce}{number}⟧" for number, token in enumerate(special)}
        data = json.loads(tokenizer.to_str())
        for entry in data["added_tokens"]:
            entry["content"] = self._names.get(entry["content"], entry["content"])
        self._rename_pieces(data["model"])
        self._tokenizer = BackendTokenizer.from_str(json.dumps(data))
        self._ids = {self._tokenizer.token_to_id(self._names[token]): special[token] for token in special}

    def _rename_pieces(self, model: dict[str, Any]) -> None:
        """In the model's own vocabulary, if they are there: else it would make them from plain text."""
        names, vocabulary = self._names, model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): piece_id for piece, piece_id in vocabulary.items()}
        elif isinstance(vocabulary, list):  # Unigram: pieces with scores
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not self._names_in(merge)]

    def _names_in(self, merge: str | Sequence[str]) -> bool:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        return any(piece in self._names for piece in (left, right, left + right))

    def encode(self, text: str, control_spans: Sequence[Span], *, add_special_tokens: bool) -> list[int]:
        parts, at = [], 0
        for begin, end in control_spans:
            parts += [text[at:begin], self._names[text[begin:end]]]
            at = end
        encoded = self._tokenizer.encode("".join([*parts, text[at:]]), add_special_tokens=add_special_tokens)
        return [self._ids.get(token_id, token_id) for token_id in encoded.ids]


def _alternation(tokens: Collection[str]) -> re.Pattern[str]:
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _inside(marks: Sequence[int], begin: int, end: int) -> bool:
    """Is one of the ascending `marks` strictly between the two?"""
    following = bisect_right(marks, begin)
    return following < len(marks) and marks[following] < end


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a JSON value, the keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)


def _marker(context: str) -> str:
    """Digits that `context` lacks: filters of templates leave them alone, and no user foresees them."""
    number = 0
    while True:
        digest = hashlib.sha256(f"{number} {context}".encode(errors="surrogatepass")).hexdigest()
        marker = str(int(digest, 16))[:24]
        if marker not in context:
            return marker
        number += 1
