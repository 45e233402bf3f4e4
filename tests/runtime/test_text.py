from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.bundlemaker import byte_tokenizer
from support.streams import BYTES, WORDS, bytes_of

from eagle_run.errors import EagleError, UsageError
from eagle_run.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}\n"
)


# --- encoding -------------------------------------------------------------------------------------------


def test_text_goes_in_and_comes_back() -> None:
    ids = BYTES.encode(WORDS)
    assert ids == bytes_of(BYTES, WORDS.encode())
    assert BYTES.decode(ids) == WORDS
    end = BYTES.backend_tokenizer.token_to_id("<end>")
    assert BYTES.special_ids == {end}
    assert BYTES.encode("a<end>") == [*BYTES.encode("a"), end]
    assert BYTES.decode([*ids, end]) == WORDS
    assert BYTES.decode([end], skip_special_tokens=False) == "<end>"


def test_padding_and_truncation_of_the_file_are_ignored() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    assert Tokenizer(tokenizer).encode("abcdef") == BYTES.encode("abcdef")


def test_invalid_unicode_is_a_usage_error() -> None:
    broken = b"ab\xff".decode("utf-8", errors="surrogateescape")
    with pytest.raises(UsageError, match="not valid UTF-8: undecodable byte at character 2"):
        BYTES.encode(broken)
    with pytest.raises(UsageError, match="not valid UTF-8"):
        Tokenizer(byte_tokenizer(), chat_template=CHATML).encode_prompt(broken)


@pytest.mark.parametrize("prompt", ["", "  \n\t"])
@pytest.mark.parametrize("raw", [True, False])
def test_an_empty_prompt_is_an_error_of_the_input(prompt: str, raw: bool) -> None:
    with pytest.raises(EagleError, match="the prompt is empty") as caught:
        BYTES.encode_prompt(prompt, raw=raw)
    assert caught.value.exit_code == 1  # as on the command line


def test_a_prompt_uses_the_chat_template_if_there_is_one() -> None:
    chat = Tokenizer(byte_tokenizer(), chat_template=CHATML, special_tokens={"eos_token": "<end>"})
    expected = chat.encode("<user>hi<end><assistant>", add_special_tokens=False)
    assert chat.encode_prompt("hi") == expected
    assert chat.encode_prompt("hi", system="be brief") == [
        *chat.encode("<system>be brief<end>", add_special_tokens=False),
        *expected,
    ]
    assert chat.encode_prompt("hi", raw=True) == chat.encode("hi")
    assert BYTES.encode_prompt("hi") == BYTES.encode("hi")
    with pytest.raises(UsageError, match="needs a chat template"):
        BYTES.encode_prompt("hi", system="be brief")


# --- templates ------------------------------------------------------------------------------------------


def render(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    text = Tokenizer(byte_tokenizer(), chat_template=template, special_tokens={"bos_token": "<s>"})
    return text.render(messages or ({"role": "user", "content": "hi"},), **variables)


def test_templates_find_what_transformers_gives_them() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] | tojson }}", {"content": 'é"<'}) == '<s>"é\\"<"'
    before = datetime.now().year
    year = int(render("{{ strftime_now('%Y') }}"))
    assert before <= year <= datetime.now().year  # it may be New Year's Eve
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{{ tools is none }} {{ enable_thinking }}", enable_thinking=False) == "True False"
    assert render("{{ 'x' if 'content' in messages[0] else 'y' }}", {"role": "a", "content": None}) == "y"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses this conversation"),
        ("{% if %}", "refuses this conversation"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refuses this conversation"),
    ],
)
def test_a_template_that_fails_is_an_eagle_error(template: str, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        render(template)


def test_conversations_must_be_plain_and_not_empty() -> None:
    with pytest.raises(UsageError, match="plain JSON"):
        render("{{ messages }}", {"content": object()})
    with pytest.raises(UsageError, match="conversation is empty"):
        Tokenizer(byte_tokenizer(), chat_template=CHATML).render([])
    with pytest.raises(EagleError, match="no chat template"):
        BYTES.render([{"role": "user", "content": "hi"}])


# --- files ----------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, **files: object) -> Path:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_everything_is_read_from_the_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "<end>",
        "pad_token": None,
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "old"}],
    }
    text = Tokenizer.load(write_tokenizer(tmp_path, tokenizer_config=config))
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert text.chat_template == "old"
    assert text.eos_token_ids == (256,)
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    write_tokenizer(tmp_path, generation_config={"eos_token_id": [3, 1]})
    text = Tokenizer.load(tmp_path)
    assert (text.chat_template, text.eos_token_ids) == ("new", (3, 1))
    write_tokenizer(
        tmp_path, generation_config={"eos_token_id": 7}, tokenizer_config={"chat_template": "only"}
    )
    (tmp_path / "chat_template.jinja").unlink()
    text = Tokenizer.load(tmp_path)
    assert (text.chat_template, text.eos_token_ids) == ("only", (7,))
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.load(tmp_path).eos_token_ids == ()


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path, tokenizer_config="{")
    with pytest.raises(EagleError, match=r"tokenizer_config\.json: not readable as JSON"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path, tokenizer_config="[]")
    with pytest.raises(EagleError, match="expected a JSON object, found list"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(EagleError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.load(tmp_path)
