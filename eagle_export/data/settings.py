"""What decides the contents of a data folder: where prompts come from, how is sampled, what is dropped."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_run.errors import EagleError, UsageError

LOOPS = ("drop", "cut", "keep")
_MASK = (1 << 64) - 1
# Streams of the seeds: what a number is drawn for.
PROMPTS, SELF_PLAY, TEMPERATURE, OPENING, WRITE, ANSWER, TURNS = range(7)


@dataclass(frozen=True)
class DataSettings:
    """Everything that the conversations depend on, beside the target.

    prompts, exclude: JSON lines files. self_play: prompts that the target writes itself; turns: most turns of
    such a conversation. openings: a file of forced beginnings, None for the built-in ones. temperatures:
    pairs of (temperature of the answers, share). prompt_temperature: of what the target writes as a user.
    top_k: of both. max_prompt_tokens: of a conversation before its first answer. max_seq_len: of a whole
    conversation. near: see variety.Seen. exclude_words: length of the runs that tell a benchmark's prompt.
    loops: what happens to answers that go round in circles. shard_size: prompts in a shard.
    """

    prompts: tuple[Path, ...] = ()
    self_play: int = 0
    turns: int = 1
    openings: Path | None = None
    exclude: tuple[Path, ...] = ()
    exclude_words: int = 8
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.5), (0.7, 0.25), (1.0, 0.25))
    prompt_temperature: float = 1.0
    top_k: int = 40
    seed: int = 0
    max_prompt_tokens: int = 512
    max_new_tokens: int = 512
    max_seq_len: int = 2048
    near: float = 0.7
    loops: str = "drop"
    shard_size: int = 1024

    def check(self) -> None:
        """Raises UsageError for settings that make no sense together."""
        if not self.prompts and not self.self_play:
            raise UsageError(
                "nothing to answer: no prompts, and none for the target to write itself",
                hint="give a file of prompts, or let the target write some, such as 1000",
                parameters=["prompts", "self_play"],
            )
        if not self.self_play and (self.openings is not None or self.turns != 1):
            raise UsageError(
                "openings and turns are for prompts that the target writes itself",
                hint="let it write some, or leave them out",
                parameters=["self_play", "openings", "turns"],
            )
        if 0 < self.prompt_temperature < 1e-6:
            raise UsageError(
                f"prompt_temperature is {self.prompt_temperature}, expected 0, or 1e-6 and more",
                hint="give 0",
                parameters=["prompt_temperature"],
            )
        if self.max_prompt_tokens >= self.max_seq_len:
            raise UsageError(
                f"max_prompt_tokens of {self.max_prompt_tokens} leaves no room for an answer in "
                f"max_seq_len of {self.max_seq_len}",
                hint="make the first smaller, or the second larger",
                parameters=["max_prompt_tokens", "max_seq_len"],
            )

    def record(self) -> dict[str, Any]:
        """As data.json has it: files by name and content, so that a resumed run is known to be the same."""
        data: dict[str, Any] = asdict(self)
        for name in ("prompts", "exclude"):
            data[name] = [_identity(path) for path in getattr(self, name)]
        data["openings"] = None if self.openings is None else _identity(self.openings)
        data["temperatures"] = [list(pair) for pair in self.temperatures]
        return data


def _identity(path: Path) -> dict[str, str]:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise EagleError(f"{path}: cannot be read: {error.strerror or error}") from None
    return {"name": path.name, "sha256": digest}


def parse_temperatures(text: str) -> tuple[tuple[float, float], ...]:
    """`0:0.5,0.7:0.25,1.0:0.25` or a single temperature → ((temperature, share), ...), shares summing to 1.

    Shares are relative; one that is left out is 1. Raises UsageError for what is no such list.
    """
    pairs = []
    for part in text.split(","):
        value, _, share = part.partition(":")
        try:
            pair = float(value), float(share or 1)
        except ValueError:
            pair = -1.0, -1.0
        fits = (pair[0] == 0 or 1e-6 <= pair[0] <= 100) and 0 < pair[1] < float("inf")
        if not fits:
            raise UsageError(
                f"temperatures with their shares are expected, found {part!r} in {text!r}",
                hint="for example 0:0.5,0.7:0.25,1.0:0.25",
                parameters=["temperatures"],
            )
        pairs.append(pair)
    total = sum(share for _, share in pairs)
    return tuple((value, share / total) for value, share in pairs)


def mixed(*numbers: int) -> int:
    """A 63-bit number that is a function of all of `numbers` and their order (SplitMix64's finaliser)."""
    state = 0
    for number in numbers:
        state = (state + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def share_of(*numbers: int) -> float:
    """A number in [0, 1) that is a function of `numbers`."""
    return (mixed(*numbers) >> 10) * 2.0**-53


def pick_temperature(settings: DataSettings, seed: int) -> float:
    """The temperature of the conversation with this seed."""
    coin = share_of(seed, TEMPERATURE)
    for temperature, share in settings.temperatures:
        coin -= share
        if coin < 0:
            return temperature
    return settings.temperatures[-1][0]
