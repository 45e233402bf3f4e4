"""Prompt ⇄ token ids: chat template, encoding, incremental decoding, stop strings.

Reads the tokenizer/ folder of a bundle with `tokenizers` and `jinja2` alone; the results equal those of
Transformers (tested), whose conventions for templates and special tokens are followed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as BackendTokenizer

Message = Mapping[str, Any]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a bundle.

    `special_tokens` maps bos_token, eos_token, ... to their strings; `eos_token_ids` are the ids at which
    generation_config.json ends an answer (else the id of eos_token, if any).
    """

    def __init__(
        self,
        tokenizer: BackendTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        # A tokenizer.json may carry the padding and truncation of its training; prompts want neither.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.backend_tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.eos_token_ids = tuple(eos_token_ids)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template: jinja2.Template | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        Only the first must exist. Raises EagleError when a file is missing or cannot be read.
        """
        from tokenizers import Tokenizer as BackendTokenizer

        root = Path(folder)
        where = root / "tokenizer.json"
        if not where.is_file():
            raise EagleError(
                f"{where}: no such file", hint="give a folder that holds a fast tokenizer (tokenizer.json)"
            )
        try:
            tokenizer = BackendTokenizer.from_file(str(where))
        except Exception as error:  # tokenizers raises bare Exception
            raise EagleError(f"{where}: not a readable tokenizer: {error}") from None
        config = _read_json(root / "tokenizer_config.json")
        special = {name: _token_text(config[name]) for name in _SPECIAL if config.get(name)}
        eos = _read_json(root / "generation_config.json").get("eos_token_id")
        if eos is None and "eos_token" in special:
            eos = tokenizer.token_to_id(special["eos_token"])
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        template = _read_template(root, config)
        return cls(tokenizer, special_tokens=special, chat_template=template, eos_token_ids=eos_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text. Raises UsageError when the text is not valid Unicode."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid UTF-8: undecodable byte at character {error.start}",
                hint="convert the input to UTF-8",
            ) from None
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_prompt(self, prompt: str, *, system: str | None = None, raw: bool = False) -> list[int]:
        """Ids of one user turn through the chat template; of the bare text if `raw` or without a template.

        Raises EagleError for an empty prompt.
        """
        if not prompt.strip():
            raise EagleError("the prompt is empty", hint="give some text with --prompt, or on standard input")
        if raw or self.chat_template is None:
            if system is not None:
                raise UsageError(
                    "a system prompt needs a chat template",
                    hint="leave out --system, or put it in the prompt",
                )
            return self.encode(prompt)
        head = [] if system is None else [{"role": "system", "content": system}]
        return self.encode_chat([*head, {"role": "user", "content": prompt}])

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Ids of a conversation rendered by the chat template, ready for the assistant's answer."""
        return self.encode(self.render(messages, **variables), add_special_tokens=False)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the chat template writes it.

        `messages` are dicts with role and content; `variables` (tools, documents, enable_thinking, ...) are
        passed to the template. Raises EagleError without a template or when the template refuses.
        """
        if self.chat_template is None:
            raise EagleError(
                "this tokenizer has no chat template", hint="use the prompt as it is, with --raw"
            )
        if not messages:
            raise UsageError("the conversation is empty", hint="give at least one message")
        values = {"tools": None, "documents": None, **self.special_tokens, **_plain(variables)}
        # Templates test for a key's presence, so an absent value must be an absent key.
        chat = [{key: value for key, value in _plain(m).items() if value is not None} for m in messages]
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            return self._template.render(messages=chat, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template can fail in any way that Python can
            raise EagleError(f"the chat template refuses this conversation: {error}") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


class Detokenizer:
    """Turns a growing sequence of ids into text, piece by piece; the pieces join to the decoded whole.

    A piece ends at a character border: bytes of an unfinished UTF-8 character are held back. Each push
    decodes only the tokens since the last border (and the piece before it, for context): O(1) a token.
    """

    _LONGEST = 32  # undecodable tokens kept; past this they are garbage, not an unfinished character
    _KEPT = 16  # more than enough to resynchronise UTF-8 (3 bytes) and to cover the characters held back

    def __init__(self, text: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._text = text
        self._skip = text.special_ids if skip_special_tokens else frozenset()
        self._context: list[int] = []  # the tokens of the last finished piece
        self._pending: list[int] = []
        self._emitted = 0  # characters of decode(context + pending) that are already out

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; may be empty."""
        # Special tokens are dropped here, since decoders treat the first token of a sequence differently.
        return "".join(self._push(token) for token in ids if token not in self._skip)

    def flush(self) -> str:
        """The rest, at the end: an unfinished character becomes U+FFFD."""
        rest = self._decode(self._context + self._pending)[self._emitted :]
        self._context, self._pending, self._emitted = [], [], 0
        return rest

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        held = len(text) - len(text.rstrip(_REPLACEMENT))  # maybe an unfinished character
        overdue = len(self._pending) > self._LONGEST
        if overdue:
            held = min(held, 3)  # one takes up 1 (byte-level) to 3 (byte fallback) of them, always the last
        piece = text[self._emitted : len(text) - held]
        self._emitted = max(self._emitted, len(text) - held)
        if held == 0 and piece:  # a token without text is no context
            self._restart(self._pending, held=0)
        elif overdue:
            self._restart(self._pending[-self._KEPT :], held=held)
        return piece

    def _restart(self, context: list[int], *, held: int) -> None:
        """Forget all tokens before `context`, whose last `held` characters are not out yet."""
        self._context, self._pending = context, []
        self._emitted = len(self._decode(context)) - held

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, skip_special_tokens=False)


class StopStrings:
    """Lets text through up to the first complete stop string, even one that arrives in pieces.

    Tokenizer that may be the beginning of a stop string is held back until the next push decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty", hint="give at least one character")
        self.stops = tuple(stops)
        self.stopped = False
        self.reached: str | None = None
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, whether a stop string was reached). After a stop nothing comes any more."""
        if self.stopped:
            return "", True
        text = self._held + text
        # The stop string that is complete first wins, so that the cut does not depend on how text arrives.
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, at, self.reached = min(found)
            return text[:at], True
        size = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size], False

    def flush(self) -> str:
        """What is still held back, when generation ends for another reason."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _environment() -> jinja2.Environment:
    """The names and filters that chat templates may count on, in a sandbox: templates are untrusted code."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here it only passes its body on."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which prompts must not have.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of JSON types only: objects with methods have no place in a sandboxed template."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"messages must be plain JSON values: {error}") from None
    return copy


def _read_json(where: Path) -> dict[str, Any]:
    if not where.is_file():
        return {}
    try:
        data = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EagleError(f"{where}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise EagleError(f"{where}: expected a JSON object, found {type(data).__name__}")
    return data


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_template(root: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the older key of tokenizer_config.json (a text, or a list of named ones)."""
    where = root / "chat_template.jinja"
    if where.is_file():
        return where.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
