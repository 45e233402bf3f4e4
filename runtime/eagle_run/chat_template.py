"""Chat templates: which messages one takes, and rendering them as Transformers does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes

Message = Mapping[str, Any]
_COMMON_ROLES = frozenset({"system", "user", "assistant"})


class ChatTemplate:
    """A chat template in Jinja.

    Which roles it takes is read from its source: `system`, `user` and `assistant` always (it may still refuse
    them itself), any other only if the source compares a role with that name or looks it up in a dict; a
    template that writes whatever role it is given would otherwise let a misspelt one through. It shows tool
    calls if its source mentions `tool_calls`. Raises EagleError when the source is not valid Jinja.
    """

    def __init__(self, source: str) -> None:
        import jinja2

        self.source = source
        environment = _environment()
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise EagleError(f"the chat template is not valid: {error}") from None

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles that a message may have."""
        from jinja2 import nodes

        return _COMMON_ROLES.union(
            *(_constants(part) for part in self._tree.find_all(nodes.Compare) if _reads(part, "role")),
            *(_constants(pair.key) for pair in self._tree.find_all(nodes.Pair)),
            *(_constants(value) for part in self._tree.find_all(nodes.Filter) for value in _selected(part)),
        )

    @cached_property
    def shows_tool_calls(self) -> bool:
        return _reads(self._tree, "tool_calls") or "tool_calls" in _constants(self._tree)

    @cached_property
    def _tests_for_null_content(self) -> bool:
        from jinja2 import nodes

        return any(
            test.name == "none" and _reads(test, "content") for test in self._tree.find_all(nodes.Test)
        )

    def prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template gets them: `normalize_messages`, and what this template can show.

        A null content reaches a template that tests `content is none`; others, which test for the key, get a
        message without it. Raises UsageError with the number of a message that does not fit.
        """
        chat = normalize_messages(messages)
        for number, message in enumerate(chat, start=1):
            if message["role"] not in self.roles:
                raise UsageError(
                    f"message {number}: this chat template has no role {message['role']!r}",
                    hint=f"its roles are {', '.join(sorted(self.roles))}",
                )
            if message["content"] is None:
                if not self.shows_tool_calls:
                    raise UsageError(
                        f"message {number}: the content is null, and this chat template shows no tool calls",
                        hint="give the content as text",
                    )
                if not self._tests_for_null_content:
                    del message["content"]
        return chat

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The text of prepared messages. `now` is what `strftime_now` tells; by default the present.

        Raises EagleError when the template refuses.
        """
        moment = now or datetime.now()
        try:
            return self._template.render(
                {
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": moment.strftime,
                }
            )
        except Exception as error:  # a template can fail in any way that Python can
            raise EagleError(f"the chat template refuses this conversation: {error}") from None


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Checked copies of chat messages, as the OpenAI API has them: each has a role, and content as text.

    Content may come as a list of parts {"type": "text", "text": ...}, whose texts are joined by line feeds as
    vLLM does. It may be null or missing in an assistant's message with tool calls only. Other keys stay as
    they are, but for nulls, which are dropped: templates test for a key's presence.
    Raises UsageError with the number of the message that is none of this.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError(f"a conversation should be a list of messages, found {type(messages).__name__}")
    if not messages:
        raise UsageError("the conversation is empty", hint="give at least one message")
    return [_normalize(message, f"message {number}") for number, message in enumerate(messages, start=1)]


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(
            f'{where}: expected an object with "role" and "content", found {type(message).__name__}'
        )
    copy = plain_json(message, where)
    role, content = copy.get("role"), copy.get("content")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where}: a role is missing", hint='for example "user"')
    if isinstance(content, list):
        content = _joined(content, where)
    if content is None:
        if role != "assistant" or not copy.get("tool_calls"):
            raise UsageError(
                f"{where}: the content is missing",
                hint="only an assistant's message with tool_calls goes without",
            )
    elif not isinstance(content, str):
        raise UsageError(
            f"{where}: the content should be text or a list of text parts, found {type(content).__name__}"
        )
    return {key: value for key, value in copy.items() if value is not None} | {"content": content}


def _joined(parts: list[Any], where: str) -> str:
    if not parts:
        raise UsageError(f"{where}: the content is an empty list", hint="give at least one text part")
    texts = []
    for number, part in enumerate(parts, start=1):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise UsageError(f'{where}, part {number}: expected {{"type": "text", "text": ...}}')
        if part["type"] != "text":
            raise UsageError(
                f"{where}, part {number}: {part['type']!r} is not supported", hint="parts can be text only"
            )
        if not isinstance(part.get("text"), str):
            raise UsageError(f'{where}, part {number}: "text" should be text')
        texts.append(part["text"])
    return "\n".join(texts)


def plain_json(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of JSON types only: objects with methods have no place in a sandboxed template."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: expected plain JSON values: {error}") from None
    return copy


def _reads(tree: jinja2.nodes.Node, name: str) -> bool:
    """Does this part of a template look at something of that name: x.name, x['name'], name?"""
    from jinja2 import nodes

    return any(
        (isinstance(node, nodes.Getattr) and node.attr == name)
        or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == name)
        or (isinstance(node, nodes.Name) and node.name == name)
        for node in _nodes(tree)
    )


def _constants(tree: jinja2.nodes.Node) -> set[str]:
    """The texts in this part of a template, but for the names of keys that are read."""
    from jinja2 import nodes

    keys = {id(node.arg) for node in _nodes(tree) if isinstance(node, nodes.Getitem)}
    return {
        node.value
        for node in _nodes(tree)
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and id(node) not in keys
    }


def _selected(part: jinja2.nodes.Filter) -> list[jinja2.nodes.Expr]:
    """The roles that a filter such as selectattr("role", "equalto", ...) picks messages by."""
    return part.args[2:] if part.args and "role" in _constants(part.args[0]) else []


def _nodes(tree: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Node]:
    yield tree
    for child in tree.iter_child_nodes():
        yield from _nodes(child)


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
    return environment
