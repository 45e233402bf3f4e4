"""Prompts and question sets from files: JSON lines, FastChat-style or simpler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from eagle_run.chat_template import normalize_messages
from eagle_run.errors import EagleError
from eagle_run.json_files import MAX_BYTES, parse_json, read_bytes

_SHAPES = (
    'expected a string, or an object with "turns" (a list of strings), "prompt" (a string) or "messages"'
)


@dataclass(frozen=True)
class Question:
    """A question and its follow-ups: what the user says in each turn."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_questions(path: str | Path, *, limit: int = 0, turns: str = "first") -> list[Question]:
    """The first `limit` questions (0: all) of a FastChat-style file; `turns` is "first" or "all".

    A line is {"question_id", "category", "turns": [...]}; a line with only "prompt", or a bare string, is a
    question of one turn named by its line number. Raises EagleError with the line of what does not fit.
    """
    questions: list[Question] = []
    for number, entry in read_lines(path):
        if limit and len(questions) == limit:
            break
        where = f"{path}, line {number}"
        data = {"turns": [entry]} if isinstance(entry, str) else entry
        said = data.get("turns", [data["prompt"]] if "prompt" in data else None)
        if not isinstance(said, list) or not said or not all(isinstance(turn, str) for turn in said):
            raise EagleError(f'{where}: expected {{"question_id": ..., "turns": [text, ...]}}')
        if not all(turn.strip() for turn in said):
            raise EagleError(f"{where}: a turn is empty")
        name = str(data.get("question_id", data.get("id", number)))
        kept = said if turns == "all" else said[:1]
        questions.append(Question(name, str(data.get("category", "")), tuple(kept)))
    if not questions:
        raise EagleError(f"{path}: no questions in this file", hint='one JSON line each: {"turns": ["..."]}')
    return questions


def read_prompts(path: str | Path) -> list[str | list[dict[str, Any]]]:
    """One prompt a line: a text, or chat messages. Of a question's turns the first is taken.

    Messages are those of `normalize_messages`; their contents come back as text. Raises EagleError with the
    line of what does not fit.
    """
    prompts: list[str | list[dict[str, Any]]] = []
    for number, entry in read_lines(path):
        where = f"{path}, line {number}"
        if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            prompts.append(_messages(entry["messages"], where))
            continue
        turns = entry.get("turns") if isinstance(entry, dict) else None
        text = entry.get("prompt", turns[0] if turns else None) if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise EagleError(f"{where}: {_SHAPES}")
        if not text.strip():
            raise EagleError(f"{where}: the prompt is empty")
        prompts.append(text)
    if not prompts:
        raise EagleError(f"{path}: no prompts in this file", hint='one JSON line each: {"prompt": "..."}')
    return prompts


def read_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each JSON line that is not blank; a value is a string or an object.

    A file may be larger than memory: of it one line is held, of at most MAX_BYTES.
    """
    for number, line in _text_lines(path):
        if not line.strip():
            continue
        value = parse_json(line, f"{path}, line {number}")
        try:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
        except UnicodeEncodeError:
            raise EagleError(f"{path}, line {number}: the text is not valid Unicode") from None
        if not isinstance(value, str | dict):
            raise EagleError(f"{path}, line {number}: {_SHAPES}")
        yield number, value


def _text_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line. In bytes a line ends at a line feed alone: text would also break at
    characters such as U+2028, which JSON allows inside a string."""
    offset = 0
    try:
        with Path(path).open("rb") as file:
            for number in count(1):
                line = file.readline(MAX_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_BYTES:
                    raise EagleError(f"{path}, line {number}: longer than {MAX_BYTES:,} bytes")
                yield number, decode_utf8(line, str(path), offset)
                offset += len(line)
    except OSError as error:
        raise EagleError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_text(path: str | Path) -> str:
    """A whole UTF-8 file; EagleError when it is missing, very large, or something else."""
    return decode_utf8(read_bytes(Path(path)), str(path))


def decode_utf8(data: bytes, where: str, offset: int = 0) -> str:
    """Bytes → text; EagleError says where they stop being UTF-8. A byte order mark is dropped where the text
    begins. offset: of the first byte in `where`."""
    try:
        return data.decode("utf-8" if offset else "utf-8-sig")
    except UnicodeDecodeError as error:
        offset += len(data) - len(error.object)  # a byte order mark was taken off
        raise EagleError(
            f"{where} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start}",
            hint="convert it first, e.g. with `iconv -t utf-8`",
        ) from None


def _messages(messages: list[Any], where: str) -> list[dict[str, Any]]:
    try:
        return normalize_messages(messages)
    except EagleError as error:
        raise EagleError(f"{where}: {error.message}", hint=error.hint) from None
