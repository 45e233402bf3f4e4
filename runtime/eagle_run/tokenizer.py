"""Prompt ⇄ token ids: raw text and conversations in, text out.

Reads the tokenizer/ folder of a bundle with `tokenizers` and `jinja2` alone; the results equal those of
Transformers (tested), whose names and conventions are followed here, but for one: special tokens that a
message spells out stay text (docs/chat.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from eagle_run.chat_template import ChatTemplate, Message, plain_json
from eagle_run.errors import EagleError, UsageError
from eagle_run.json_files import read_json_object
from eagle_run.special_tokens import Chat, RenderedChat, SpecialTokens, Values

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
        self._special = SpecialTokens(tokenizer, self.eos_token_ids)
        self._template: ChatTemplate | None = None

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

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of raw text, in which special tokens are spelled out if `split_special_tokens`.

        Raises UsageError when the text is not valid Unicode.
        """
        return self._encode(
            RenderedChat(text, () if split_special_tokens else None), add_special_tokens=add_special_tokens
        )

    def encode_prompt(self, prompt: str, *, system: str | None = None, raw: bool = False) -> list[int]:
        """Ids of one user turn through the chat template; of the bare text if `raw` or without a template.

        In bare text, which may be a conversation that the caller has rendered, special tokens count as such.
        Raises EagleError for an empty prompt.
        """
        if not prompt.strip():
            raise EagleError("the prompt is empty", hint="give some text", parameters=["prompt"])
        if raw or self.chat_template is None:
            if system is not None:
                raise UsageError(
                    "a system prompt needs a chat template",
                    hint="leave it out, or put it in the prompt",
                    parameters=["system"],
                )
            return self.encode(prompt)
        head = [] if system is None else [{"role": "system", "content": system}]
        return self.encode_chat([*head, {"role": "user", "content": prompt}])

    def encode_chat(
        self, messages: Sequence[Message], *, split_special_tokens: bool = True, **variables: Any
    ) -> list[int]:
        """`apply_chat_template` to ids, ready for the assistant's answer."""
        ids: list[int] = self.apply_chat_template(
            messages, split_special_tokens=split_special_tokens, **variables
        )
        return ids

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = True,
        split_special_tokens: bool = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = True,
        split_special_tokens: bool = True,
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        split_special_tokens: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """A conversation as the chat template writes it: token ids, or text without `tokenize`.

        With `split_special_tokens` special tokens that a message spells out are text, and only the template's
        own control the model; without it both do. The rest is said at `render_chat`.
        """
        if not tokenize:  # the text is the same however it will be encoded
            split_special_tokens = False
        rendered = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            split_special_tokens=split_special_tokens,
            **variables,
        )
        return self.encode_rendered(rendered) if tokenize else rendered.text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        split_special_tokens: bool = True,
        **variables: Any,
    ) -> RenderedChat:
        """The conversation as text that knows which special tokens are the template's own.

        `messages` are objects with role and content (`chat_template.normalize_messages` and
        `ChatTemplate.prepare` say which); `variables` (tools, documents, enable_thinking, ...) are passed to
        the template. Without `split_special_tokens` all special tokens count as the template's.
        Raises UsageError for a message that is not what it should be, and when the template changes
        special-token text of a message; EagleError without a template, or when it refuses.
        """
        template = self._chat_template()
        chat = template.prepare(messages)
        now = datetime.now()  # the same in each rendering

        def render(chat: Chat, variables: Values) -> str:
            values = {"tools": None, "documents": None, **self.special_tokens, **variables}
            return template.render(chat, values, add_generation_prompt=add_generation_prompt, now=now)

        given = plain_json(variables, "variables of the chat template")
        if split_special_tokens:
            return self._special.render(render, chat, given)
        return RenderedChat(render(chat, given))

    def encode_rendered(self, rendered: RenderedChat) -> list[int]:
        """Token ids of a rendered conversation, or of a part of one."""
        return self._encode(rendered, add_special_tokens=False)

    def _encode(self, rendered: RenderedChat, *, add_special_tokens: bool) -> list[int]:
        try:
            rendered.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid UTF-8: undecodable byte at character {error.start}",
                hint="convert the input to UTF-8",
            ) from None
        return self._special.encode(rendered, add_special_tokens=add_special_tokens)

    def _chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise EagleError(
                "this tokenizer has no chat template", hint="use the prompt as it is", parameters=["raw"]
            )
        if self._template is None or self._template.source != self.chat_template:
            self._template = ChatTemplate(self.chat_template)
        return self._template

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def _read_json(where: Path) -> dict[str, Any]:
    return read_json_object(where) if where.is_file() else {}


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
