"""Conversations from JSON lines: FastChat/ShareGPT, OpenAI, SpecForge, FastChat questions, bare prompts.

Only what was asked is taken, that is the system message and the user's turns: the target gives the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_run.datasets import read_lines
from eagle_run.errors import EagleError

_SHAPES = (
    'expected {"conversations": [{"from": "human", "value": "..."}]}, {"messages": [{"role": "user", '
    '"content": "..."}]}, {"turns": ["..."]}, {"prompt": "..."} or a string'
)
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
}


@dataclass(frozen=True)
class Prompt:
    """What the user says turn by turn, and what the system message is, if there is one."""

    turns: tuple[str, ...]
    system: str | None = None


def read_conversations(path: str | Path) -> list[Prompt]:
    """The prompts of a JSON lines file, one a line; each line may have another of the known shapes.

    A conversation that ends with an answer or with a question is the same: answers are dropped. Raises
    EagleError, naming the line, for what has none of the shapes, an unknown role, or an empty turn.
    """
    prompts = [_prompt(entry, f"{path}, line {number}") for number, entry in read_lines(path)]
    if not prompts:
        raise EagleError(f"{path}: no conversations in this file", hint=f"one JSON object a line: {_SHAPES}")
    return prompts


def _prompt(entry: str | Mapping[str, Any], where: str) -> Prompt:
    if isinstance(entry, str):
        return _checked([entry], None, where)
    for key in ("conversations", "conversation", "messages"):
        if key in entry:
            return _from_messages(entry[key], key, where)
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise EagleError(f'{where}: "turns" should be a list of texts')
        return _checked(turns, entry.get("system"), where)
    if isinstance(entry.get("prompt"), str):
        return _checked([entry["prompt"]], entry.get("system"), where)
    raise EagleError(f"{where}: {_SHAPES}")


def _from_messages(messages: Any, key: str, where: str) -> Prompt:
    if not isinstance(messages, list) or not messages:
        raise EagleError(f'{where}: "{key}" should be a list of messages')
    turns: list[str] = []
    system = None
    for place, message in enumerate(messages, start=1):
        role, content = _message(message, f"{where}, message {place}")
        if role == "system":
            if place > 1:
                raise EagleError(f"{where}, message {place}: a system message can only be the first")
            system = content
        elif role == "user":
            if place > 1 and _ROLES.get(_role(messages[place - 2])) == "user":
                raise EagleError(f"{where}, message {place}: two turns of the user in a row")
            turns.append(content)
    if not turns:
        raise EagleError(f"{where}: the user says nothing in this conversation")
    return _checked(turns, system, where)


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise EagleError(f"{where}: expected an object, found {type(message).__name__}")
    given = _role(message)
    role = _ROLES.get(given)
    if role is None:
        known = ", ".join(sorted(_ROLES))
        raise EagleError(f"{where}: unknown role {given!r}", hint=f"roles are {known}")
    content = message.get("content", message.get("value"))
    if not isinstance(content, str):
        raise EagleError(
            f'{where}: expected a text as "content" (or "value"), found {type(content).__name__}'
        )
    return role, content


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role", message.get("from"))).lower()


def _checked(turns: Sequence[str], system: Any, where: str) -> Prompt:
    if not turns or not all(turn.strip() for turn in turns):
        raise EagleError(f"{where}: a turn of the user is empty")
    if system is not None and not isinstance(system, str):
        raise EagleError(f'{where}: "system" should be a text, found {type(system).__name__}')
    return Prompt(tuple(turns), system)
