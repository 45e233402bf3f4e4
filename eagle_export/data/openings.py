"""Openings: how prompts begin that the target then writes on. A file of templates, filled in by a seed.

    # a comment
    @fruit: apple | pear | plum            a list of words
    [cooking] 2                            a section; it is drawn twice as often as one without a number
    Give me a recipe with {fruit} and {3-7} {herbs|spices} that              the target writes on from here
    How many calories has {fruit}?<end>    a whole prompt
    <free>                                 no opening: the target's own idea

A section is drawn by its weight, then one of its lines. `{name}` takes a word of a list (which may hold such
braces itself), `{a|b}` one of these, `{2-99}` a whole number; `\\n` is a line break, `{{` and `}}` are
braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from eagle_export.data.settings import mixed, share_of
from eagle_run.datasets import read_text
from eagle_run.errors import EagleError

BUILT_IN = Path(__file__).with_name("openings.txt")
END, FREE = "<end>", "<free>"
_SLOT = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_DEEPEST = 8


@dataclass(frozen=True)
class Opening:
    """The beginning of a prompt, or all of it if `whole`."""

    text: str
    whole: bool


@dataclass
class Section:
    name: str
    weight: float
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Openings:
    """What a file of openings holds."""

    sections: tuple[Section, ...]
    lists: dict[str, tuple[str, ...]]

    def draw(self, seed: int) -> Opening:
        """One opening, a function of the seed alone."""
        coin = share_of(seed, 0) * sum(section.weight for section in self.sections)
        section = self.sections[-1]
        for candidate in self.sections:
            coin -= candidate.weight
            if coin < 0:
                section = candidate
                break
        line = section.lines[mixed(seed, 1) % len(section.lines)]
        drawn = 1

        def number(size: int) -> int:
            nonlocal drawn
            drawn += 1
            return mixed(seed, drawn) % size

        whole = line.endswith(END)
        text = line.removesuffix(END)
        return Opening("" if text == FREE else self._filled(text, number).replace("\\n", "\n"), whole)

    def _filled(self, text: str, number: Callable[[int], int], depth: int = 0) -> str:
        if depth > _DEEPEST:
            raise EagleError(f"openings: lists that name each other without end, at {text!r}")

        def fill(match: re.Match[str]) -> str:
            if match[0] in ("{{", "}}"):
                return match[0][0]
            choices = self.choices(match[1])
            if isinstance(choices, range):
                return str(choices[number(len(choices))])
            return self._filled(choices[number(len(choices))], number, depth + 1)

        return _SLOT.sub(fill, text)

    def choices(self, slot: str) -> range | tuple[str, ...]:
        """What a slot can become. Raises KeyError for the name of no list."""
        if "|" in slot:
            return tuple(slot.split("|"))
        numbers = re.fullmatch(r"(\d+)-(\d+)", slot)
        if numbers and int(numbers[1]) <= int(numbers[2]):
            return range(int(numbers[1]), int(numbers[2]) + 1)
        return self.lists[slot]


def read_openings(path: Path | None) -> Openings:
    """The openings of a file, the built-in ones for None. Raises EagleError naming the line at fault."""
    where = path or BUILT_IN
    lists: dict[str, tuple[str, ...]] = {}
    sections: list[Section] = []
    places: list[tuple[int, str]] = []
    for number, line in enumerate(read_text(where).split("\n"), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("@"):
            name, colon, words = text[1:].partition(":")
            if not colon or not words.strip():
                raise EagleError(f"{where}, line {number}: a list should look like `@fruit: apple | pear`")
            lists[name.strip()] = tuple(word.strip() for word in words.split(" | "))
        elif header := re.fullmatch(r"\[([^\]]+)\]\s*([\d.]+)?", text):
            weight = header[2] or "1"
            if not re.fullmatch(r"\d+(\.\d+)?", weight):
                raise EagleError(f"{where}, line {number}: a section's weight is {weight!r}, not a number")
            sections.append(Section(header[1], float(weight)))
        else:
            if not sections:
                sections.append(Section("", 1.0))
            # A blank at the end would be a token of its own, which few words follow.
            sections[-1].lines.append(text)
            places.append((number, text))
    kept = tuple(section for section in sections if section.lines and section.weight > 0)
    if not kept:
        raise EagleError(f"{where}: no openings in this file", hint="one opening a line, or <free>")
    openings = Openings(kept, lists)
    _check(openings, [*places, *((0, word) for words in lists.values() for word in words)], where)
    return openings


def _check(openings: Openings, lines: list[tuple[int, str]], where: Path) -> None:
    for number, text in lines:
        for match in _SLOT.finditer(text):
            try:
                if match[1] is not None:
                    openings.choices(match[1])
            except KeyError:
                place = f"line {number}" if number else f"in {text!r}"
                known = ", ".join(openings.lists) or "none"
                raise EagleError(
                    f"{where}, {place}: no list is called {match[1]!r}",
                    hint=f"add a line `@{match[1]}: one | two`; there are {known}",
                ) from None
