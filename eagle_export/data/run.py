"""`eagle-export data`: from prompts, or from nothing, to a folder of conversations, shard by shard."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from eagle_export.data.conversations import Prompt, read_conversations
from eagle_export.data.converse import Host
from eagle_export.data.generator import Generator, GeneratorOptions, open_generator
from eagle_export.data.openings import read_openings
from eagle_export.data.settings import DataSettings
from eagle_export.data.shards import (
    VERSION,
    Part,
    ShardInfo,
    read_data,
    read_shard,
    shard_path,
    write_data,
    write_shard,
)
from eagle_export.data.variety import Excluded, Seen
from eagle_export.files import alone_in
from eagle_export.progress import Progress
from eagle_run.errors import EagleError

# Settings that a folder may be taken up with again: a longer self-play has the shards of a shorter one.
_MAY_GROW = "self_play"


@dataclass
class Pace:
    """How fast tokens come, and how long the rest takes."""

    parts: int
    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    done: int = 0  # parts made in this run

    @property
    def rate(self) -> float:
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    def rest(self) -> str:
        """ ", h:mm:ss left", as far as finished parts tell; nothing before the first and after the last."""
        if not self.done:
            return ""
        seconds = (time.monotonic() - self.started) * (self.parts - self.done) / self.done
        return f", {timedelta(seconds=round(seconds))} left" if self.done < self.parts else ""


def make_data(
    target: str, settings: DataSettings, generator_options: GeneratorOptions, out: Path, progress: Progress
) -> dict[str, Any]:
    """Makes or goes on with the data in the folder `out`; gives what data.json then holds.

    Shards that are there already are kept when they were made with the same settings and target, and the new
    ones are those that one long run would have made. Raises UsageError and EagleError for what cannot be,
    before anything is written. Ctrl-C leaves the finished shards.
    """
    settings.check()
    with alone_in(out):
        return _make_data(target, settings, generator_options, out, progress)


def _make_data(
    target: str, settings: DataSettings, generator_options: GeneratorOptions, out: Path, progress: Progress
) -> dict[str, Any]:
    record = settings.record()
    openings = read_openings(settings.openings)
    excluded = Excluded(
        (turn for path in settings.exclude for prompt in read_conversations(path) for turn in prompt.turns),
        settings.exclude_words,
    )
    seen = Seen(settings.near)
    prompts, dropped = _gather(settings, seen, excluded)
    before = read_data(out)
    if before is not None:
        had = before.get("settings", {}).get(_MAY_GROW, 0)
        _check_same(before, "settings", {**record, _MAY_GROW: had}, out)
        if settings.self_play < had:
            raise EagleError(
                f"{out} was made with {had} prompts of the target's own; fewer would leave shards of the "
                "longer run behind",
                hint=f"ask for {had} or more, or choose another folder",
                parameters=["self_play", "out"],
            )
    asked = len(prompts) + settings.self_play
    generator_options = replace(
        generator_options, batch=min(generator_options.batch, max(asked, 1))
    )  # caches for idle slots would be for nothing
    with progress.step("load the target"):
        generator = open_generator(target, generator_options, settings.max_seq_len, progress.note)
    if generator.text.chat_template is None:
        raise EagleError(
            f"{target} has no chat template, so it cannot hold conversations",
            hint="train on a target that was tuned for chat, or add chat_template.jinja to its folder",
        )
    if before is not None:
        _check_same(before, "target", generator.target, out)
        _check_same(before, "tokenizer", generator.tokenizer, out)
    data = {
        "format": "eagle-export data",
        "version": VERSION,
        "target": generator.target,
        "tokenizer": generator.tokenizer,
        "settings": record,
        "made_with": {"backend": generator.backend, "batch": generator_options.batch},
    }
    work = _Work(generator, prompts, dropped, out, data, progress)
    host = Host(generator, settings, openings, seen, excluded, work.count)
    work.run(host)
    return data


def _gather(
    settings: DataSettings, seen: Seen, excluded: Excluded
) -> tuple[list[tuple[int, Prompt]], Counter[str]]:
    """The prompts of all files with their numbers, without duplicates and without those to be excluded."""
    kept: list[tuple[int, Prompt]] = []
    dropped: Counter[str] = Counter()
    number = 0
    for path in settings.prompts:
        for prompt in read_conversations(path):
            if any(excluded.hits(turn) for turn in prompt.turns):
                reason: str | None = "excluded"
            else:
                reason = seen.add("\n".join(prompt.turns))
            if reason is None:
                kept.append((number, prompt))
            else:
                dropped[reason] += 1
            number += 1
    return kept, dropped


def _check_same(stored: dict[str, Any], part: str, now: dict[str, Any], out: Path) -> None:
    was = stored.get(part, {})
    keys = {*was, *now} - {"source"}  # where a target was read from: its sha256 tells which it is
    if differing := sorted(key for key in keys if was.get(key) != now.get(key)):
        key, another = differing[0], f"another {part.removesuffix('s')}"
        raise EagleError(
            f"{out} was made with {another}: {key} was {was.get(key)!r}, now it is {now.get(key)!r}",
            hint="repeat the settings of the first run to go on with it, or choose another folder",
            parameters=["out"],
        )


@dataclass
class _Work:
    """One run over all parts."""

    generator: Generator
    prompts: list[tuple[int, Prompt]]
    dropped: Counter[str]  # before anything was answered
    out: Path
    data: dict[str, Any]
    progress: Progress
    shards: list[tuple[str, ShardInfo]] = field(default_factory=list)
    pace: Pace = field(default_factory=lambda: Pace(0))
    _shown: float = 0.0
    _show: Any = None

    def run(self, host: Host) -> None:
        parts = self._parts(host.settings)
        there = [read_shard(shard_path(self.out, number)) for number in range(len(parts))]
        kept = [
            found is not None and found.part == part.name() for found, part in zip(there, parts, strict=True)
        ]
        self.pace = Pace(parts=kept.count(False))
        if any(kept):
            self.progress.note(f"{kept.count(True)} of {len(parts)} shards are there already")
        self._save(complete=False)
        for number, part in enumerate(parts):
            found = there[number] if kept[number] else None
            if found is None:
                found = self._make(host, number, part, len(parts))
            else:
                for text in found.written:
                    host.seen.add(text)
            self.shards.append((shard_path(self.out, number).name, found))
            self._save(complete=number == len(parts) - 1)

    def _make(self, host: Host, number: int, part: Part, parts: int) -> ShardInfo:
        with self.progress.console.status("") as status:
            self._show = lambda: status.update(
                f"shard {number + 1} of {parts}: {self.pace.tokens:,} tokens, {self.pace.rate:.0f} tokens/s"
                f"{self.pace.rest()}"
            )
            if part.kind == "prompts":
                harvest = host.answer_prompts(self.prompts[part.first : part.last])
            else:
                harvest = host.play(range(part.first, part.last))
        info = write_shard(shard_path(self.out, number), part, harvest)
        self.pace.done += 1
        self.progress.note(
            f"shard {number + 1} of {parts}: {info.conversations} conversations, "
            f"{info.dropped.total()} dropped, {info.cut} cut; {info.answer_tokens:,} tokens of answers; "
            f"{self.pace.rate:.0f} tokens/s{self.pace.rest()}"
        )
        return info

    def count(self, tokens: int) -> None:
        """Tokens came; a terminal is told twice a second."""
        self.pace.tokens += tokens
        now = time.monotonic()
        if now - self._shown > 0.5:
            self._shown = now
            self._show()

    def _parts(self, settings: DataSettings) -> list[Part]:
        size = settings.shard_size
        return [
            Part(kind, first, min(first + size, count))
            for kind, count in (("prompts", len(self.prompts)), ("self-play", settings.self_play))
            for first in range(0, count, size)
        ]

    def _save(self, *, complete: bool) -> None:
        infos = [info for _, info in self.shards]
        self.data["complete"] = complete
        self.data["counts"] = {
            "shards": len(infos),
            "conversations": sum(info.conversations for info in infos),
            "tokens": sum(info.tokens for info in infos),
            "answer_tokens": sum(info.answer_tokens for info in infos),
            "cut": sum(info.cut for info in infos),
            "dropped": dict(sorted(sum((info.dropped for info in infos), self.dropped).items())),
        }
        self.data["shards"] = [info.record(file) for file, info in self.shards]
        write_data(self.out, self.data)
