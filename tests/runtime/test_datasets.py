from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_run.datasets import read_prompts
from eagle_run.errors import EagleError


def write(folder: Path, *messages: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages), encoding="utf-8")
    return path


def test_messages_come_back_with_their_contents_as_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    chat = [{"role": "user", "content": parts, "name": None}, call, {"role": "tool", "content": "4"}]
    assert read_prompts(write(tmp_path, chat)) == [
        [{"role": "user", "content": "a\nb"}, {**call, "content": None}, {"role": "tool", "content": "4"}]
    ]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "line 2: the conversation is empty"),
        (["hi"], "line 2: message 1: expected an object"),
        ([{"role": "user"}], "line 2: message 1: the content is missing"),
        ([{"content": "hi"}], "line 2: message 1: a role is missing"),
        ([{"role": "user", "content": None}], "line 2: message 1: the content is missing"),
        ([{"role": "user", "content": 1}], "line 2: message 1: .*found int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "line 2: message 1, part 1: 'image_url'"),
    ],
)
def test_bad_messages_are_named(tmp_path: Path, chat: Any, message: str) -> None:
    path = write(tmp_path, [{"role": "user", "content": "hi"}], chat)
    with pytest.raises(EagleError, match=message) as refused:
        read_prompts(path)
    assert refused.value.exit_code == 1  # a file is at fault, not how the command was called
