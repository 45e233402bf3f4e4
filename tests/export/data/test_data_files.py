"""Every shape of conversation file gives the same prompts; what has no such shape is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_export.data.conversations import Prompt, read_conversations
from eagle_run.errors import EagleError

TWO_TURNS = {
    "sharegpt": {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "What is a fjord?"},
            {"from": "gpt", "value": "An inlet."},
            {"from": "human", "value": "Name one."},
            {"from": "gpt", "value": "Sognefjord."},
        ],
    },
    "openai": {
        "messages": [
            {"role": "user", "content": "What is a fjord?"},
            {"role": "assistant", "content": "An inlet."},
            {"role": "user", "content": "Name one."},
        ]
    },
    "specforge": {
        "id": 7,
        "conversations": [
            {"role": "user", "content": "What is a fjord?"},
            {"role": "assistant", "content": "An inlet."},
            {"role": "user", "content": "Name one."},
        ],
    },
    "questions": {"question_id": 81, "category": "x", "turns": ["What is a fjord?", "Name one."]},
}


def write(path: Path, *lines: Any) -> Path:
    texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


@pytest.mark.parametrize("shape", TWO_TURNS)
def test_answers_go_and_the_users_turns_stay(shape: str, tmp_path: Path) -> None:
    found = read_conversations(write(tmp_path / "a.jsonl", TWO_TURNS[shape]))
    assert found == [Prompt(("What is a fjord?", "Name one."))]


def test_shapes_may_be_mixed_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    path = write(tmp_path / "a.jsonl", {"prompt": "One"}, b"", "Two", system, TWO_TURNS["questions"])
    assert read_conversations(path) == [
        Prompt(("One",)),
        Prompt(("Two",)),
        Prompt(("Hi",), "Be brief."),
        Prompt(("What is a fjord?", "Name one.")),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not readable as JSON"),
        ({"text": "Hi"}, "expected"),
        ({"prompt": 3}, "expected"),
        ({"prompt": "  "}, "empty"),
        ({"turns": []}, "empty"),
        ({"turns": ["a", 1]}, "list of texts"),
        ({"turns": ["a"], "system": 1}, '"system" should be a text, found int'),
        ({"messages": []}, "list of messages"),
        ({"messages": ["Hi"]}, "message 1: expected an object"),
        ({"messages": [{"role": "user"}]}, "message 1: expected a text"),
        ({"messages": [{"role": "alien", "content": "Hi"}]}, "unknown role 'alien'"),
        ({"conversations": [{"from": "gpt", "value": "Hi"}]}, "the user says nothing"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "in a row"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "first"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(line: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(EagleError) as caught:
        read_conversations(path)
    assert f"{path}, line 2" in caught.value.message
    assert words in caught.value.message


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="no conversations"):
        read_conversations(write(tmp_path / "empty.jsonl", b""))
