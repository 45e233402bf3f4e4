"""What a benchmark has measured so far, in a file: an interrupted run goes on from there.

JSON lines: first what decides the figures, then one line for every pair as it is measured. A line that an
interruption cut is dropped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_run.bench.mismatch import Mismatch
from eagle_run.bench.result import BenchRun, Pair
from eagle_run.datasets import Question
from eagle_run.errors import EagleError
from eagle_run.json_files import parse_json, read_bytes
from eagle_run.metrics import Metrics, RoundTime


class Checkpoint:
    """The pairs in `path` (None keeps them nowhere), measured under `identity`: plain data that decides them.

    Raises EagleError for a file of another benchmark, naming what differs, and for one that is none.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        self._path = path
        self._pairs: dict[str, Pair] = {}
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, json.loads(json.dumps(identity)))
        else:
            _append(path, {"benchmark": identity})

    def find(self, questions: list[Question], turn: int) -> Pair | None:
        """The pair of these questions, if it was measured."""
        return self._pairs.get(_key(questions, turn))

    def add(self, pair: Pair) -> None:
        if self._path is not None:
            _append(self._path, {"key": _key(list(pair.questions), pair.turn), "pair": asdict(pair)})

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        first, *lines = read_bytes(path).split(b"\n")
        known = parse_json(first, f"{path}, line 1").get("benchmark")
        if not isinstance(known, dict):
            raise EagleError(
                f"{path}: expected what a benchmark keeps, found something else",
                hint="name another file, or a new one",
                parameters=["resume"],
            )
        if known != identity:
            differing = [name for name in identity if known.get(name) != identity[name]]
            raise EagleError(
                f"{path} is of another benchmark: {', '.join(differing)} differ",
                hint="repeat the run that it is of, or name a new file",
                parameters=["resume"],
            )
        whole = len(first) + 1
        for number, line in enumerate(lines, start=2):
            if number == len(lines) + 1:  # what follows the last line feed: nothing, or a line that was cut
                break
            entry = parse_json(line, f"{path}, line {number}")
            self._pairs[entry["key"]] = _pair(entry["pair"])
            whole += len(line) + 1
        with path.open("r+b") as file:
            file.truncate(whole)


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _key(questions: list[Question], turn: int) -> str:
    """Of the questions themselves, not of their place in a file."""
    asked = [[question.id, question.turns[: turn + 1]] for question in questions]
    return hashlib.sha256(json.dumps([turn, asked]).encode()).hexdigest()


def _pair(data: dict[str, Any]) -> Pair:
    return Pair(
        questions=tuple(Question(**{**each, "turns": tuple(each["turns"])}) for each in data["questions"]),
        turn=data["turn"],
        plain=tuple(map(_run, data["plain"])),
        speculative=tuple(map(_run, data["speculative"])),
        mismatches=tuple((place, Mismatch(**mismatch)) for place, mismatch in data["mismatches"]),
        answers=tuple(data["answers"]),
    )


def _run(data: dict[str, Any]) -> BenchRun:
    return BenchRun(Metrics(**data["metrics"]), tuple(RoundTime(**time) for time in data["round_times"]))
