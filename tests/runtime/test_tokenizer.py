from __future__ import annotations

import json
from pathlib import Path

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
    assert BYTES.encode("a<end>", split_special_tokens=True) == bytes_of(BYTES, b"a<end>")


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
    assert caught.value.parameters == ("prompt",)


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
    with pytest.raises(UsageError, match="needs a chat template") as caught:
        BYTES.encode_prompt("hi", system="be brief")
    assert caught.value.parameters == ("system",)


def test_special_tokens_count_in_raw_prompts_and_are_text_in_chats() -> None:
    """A raw prompt may be a conversation that the caller has rendered."""
    chat = Tokenizer(byte_tokenizer(), chat_template=CHATML, special_tokens={"eos_token": "<end>"})
    assert chat.encode_prompt("<end>", raw=True) == [256]
    assert chat.encode_prompt("<end>").count(256) == 1  # the template's


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
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, tokenizer_config=config))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert tokenizer.chat_template == "old"
    assert tokenizer.eos_token_ids == (256,)
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    write_tokenizer(tmp_path, generation_config={"eos_token_id": [3, 1]})
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("new", (3, 1))
    write_tokenizer(
        tmp_path, generation_config={"eos_token_id": 7}, tokenizer_config={"chat_template": "only"}
    )
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("only", (7,))
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
