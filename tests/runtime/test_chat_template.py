from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from support.bundlemaker import byte_tokenizer
from support.streams import BYTES

from eagle_run.chat_template import ChatTemplate, normalize_messages
from eagle_run.errors import EagleError, UsageError
from eagle_run.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}={{ m.content }}{% elif 'tool_calls' in m %}"
    "{{ m.tool_calls[0].function.name }}{{ '+content' if 'content' in m }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NULLS = (
    "{% for m in messages %}{% if m['content'] is none %}call {{ m['tool_calls'] | length }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


def render(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=template, special_tokens={"bos_token": "<s>"})
    return tokenizer.apply_chat_template(
        messages or ({"role": "user", "content": "hi"},), tokenize=False, **variables
    )


# --- rendering ------------------------------------------------------------------------------------------


def test_templates_find_what_transformers_gives_them() -> None:
    said = {"role": "user", "content": 'é"<'}
    assert render("{{ bos_token }}{{ messages[0]['content'] | tojson }}", said) == '<s>"é\\"<"'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{{ tools is none }} {{ enable_thinking }}", enable_thinking=False) == "True False"
    assert render("{{ 'x' if 'name' in messages[0] else 'y' }}", {**said, "name": None}) == "y"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses this conversation"),
        ("{% if %}", "the chat template is not valid"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refuses this conversation"),
    ],
)
def test_a_template_that_fails_is_an_eagle_error(template: str, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        render(template)


def test_another_template_takes_the_place_of_the_first() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), chat_template="one")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "one"
    tokenizer.chat_template = "two"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "two"


def test_a_tokenizer_without_a_template_says_so() -> None:
    with pytest.raises(EagleError, match="no chat template"):
        BYTES.apply_chat_template([{"role": "user", "content": "hi"}])


# --- messages -------------------------------------------------------------------------------------------


def test_text_parts_are_joined_by_line_feeds() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": None}]
    assert render(PLAIN, {"role": "user", "content": parts}) == "<user>a\nb"
    assert render(PLAIN, {"role": "user", "content": parts[:1]}) == "<user>a"
    assert parts[0] == {"type": "text", "text": "a"}  # the caller's messages are left alone
    assert render(PLAIN, {"role": "user", "content": ""}) == "<user>"


REFUSED = {
    "image": ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "part 1: 'image_url'"),
    "later part": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
        "part 2: 'input_audio' is not supported",
    ),
    "bare part": ({"role": "user", "content": ["a"]}, 'part 1: expected {"type": "text"'),
    "part without text": ({"role": "user", "content": [{"type": "text"}]}, '"text" should be text'),
    "no parts": ({"role": "user", "content": []}, "an empty list"),
    "number": ({"role": "user", "content": 5}, "found int"),
    "object": ({"role": "user", "content": {"text": "a"}}, "found dict"),
    "null": ({"role": "user", "content": None}, "content is missing"),
    "no content": ({"role": "assistant"}, "content is missing"),
    "no calls": ({"role": "assistant", "content": None, "tool_calls": []}, "content is missing"),
    "calls of the user": ({"role": "user", "content": None, "tool_calls": CALLS}, "content is missing"),
    "no role": ({"content": "a"}, "a role is missing"),
    "no name of a role": ({"role": 5, "content": "a"}, "a role is missing"),
    "no object": ("hi", "expected an object"),
    "no JSON": ({"role": "user", "content": object()}, "plain JSON"),
}


@pytest.mark.parametrize(("message", "expected"), REFUSED.values(), ids=REFUSED)
def test_messages_that_are_refused(message: Any, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        normalize_messages([{"role": "user", "content": "hi"}, message])
    assert refused.value.message.startswith("message 2")
    assert expected in refused.value.message


@pytest.mark.parametrize(("messages", "expected"), [([], "conversation is empty"), ("hi", "found str")])
def test_a_conversation_is_a_list_of_messages(messages: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        normalize_messages(messages)


def test_null_content_beside_tool_calls() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert render(TOOLS, call) == "f"  # a template that tests for the key does not find it
    assert render(TOOLS, {**call, "content": ""}) == "f+content"
    assert render(NULLS, call) == "call 1"  # a template that tests for null finds that
    del call["content"]
    assert render(NULLS, call) == "call 1"
    with pytest.raises(UsageError, match="message 1: the content is null, and this chat template shows no"):
        render(PLAIN, call)


# --- roles ----------------------------------------------------------------------------------------------

ROLES = {
    "compared": ("{% if messages[0]['role'] == 'tool' %}{% endif %}", {"tool"}),
    "in a list": ("{{ 'x' if messages[0].role in ['tool', 'ipython'] }}", {"tool", "ipython"}),
    "by a variable": ("{% set role = messages[0].role %}{{ role != 'developer' }}", {"developer"}),
    "in a dict": ("{{ {'user': 'U', 'critic': 'C'}[messages[0].role] }}", {"critic"}),
    "selected": ("{{ messages | selectattr('role', 'equalto', 'tool') | list }}", {"tool"}),
    "other comparisons": ("{{ messages[0].type == 'text' or 'name' in messages[0] }}", set()),
    "written": ("{{ messages[0]['role'] + 'tool' }}", set()),
}


@pytest.mark.parametrize(("source", "roles"), ROLES.values(), ids=ROLES)
def test_roles_are_those_that_a_template_asks_for(source: str, roles: set[str]) -> None:
    assert ChatTemplate(source).roles == {"system", "user", "assistant"} | roles


def test_a_role_that_the_template_does_not_know_is_refused() -> None:
    answer = {"role": "tool", "content": "4"}
    assert render(TOOLS, answer) == "=4"
    with pytest.raises(UsageError, match="message 1: this chat template has no role 'tool'") as refused:
        render(PLAIN, answer)
    assert refused.value.hint == "its roles are assistant, system, user"
    with pytest.raises(UsageError, match="no role 'user><end'"):
        render(PLAIN, {"role": "user><end", "content": "x"})
