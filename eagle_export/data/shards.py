"""The folder that conversations go to: data.json and NNNNN.safetensors, whole or not there at all.

A shard holds n conversations of `sum` tokens in all:

    tokens           i32 [sum]    all conversations joined, template included
    offsets          i64 [n + 1]  where each begins; the last entry is sum
    prompt_lengths   i32 [n]      tokens before the first answer
    temperature      f32 [n]      that the answers were sampled with
    loss_mask        u8 [sum]     1: a token of an answer, of any turn

Its metadata, JSON under the key "shard", say which part of the run it is (`part`), which prompts the target
wrote for it (`prompts`), how many conversations were dropped, and why (`dropped`), and how many answers were
cut where they fell into a loop (`cut`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_export.data.converse import Harvest
from eagle_export.files import whole_file
from eagle_run.errors import EagleError
from eagle_run.json_files import parse_json, read_json

DATA_FILE, VERSION = "data.json", 1


@dataclass(frozen=True)
class Part:
    """A stretch of the run that makes one shard: prompts from files or tries of self-play, [first, last)."""

    kind: str
    first: int
    last: int

    def name(self) -> str:
        return f"{self.kind} {self.first}-{self.last}"


@dataclass(frozen=True)
class ShardInfo:
    """What a shard on disk says of itself."""

    part: str
    conversations: int
    tokens: int
    answer_tokens: int
    written: tuple[str, ...]
    dropped: Counter[str]
    cut: int

    def record(self, file: str) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("conversations", "tokens", "answer_tokens", "cut")}
        return {"file": file, "part": self.part, **counts, "dropped": dict(sorted(self.dropped.items()))}


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def write_shard(path: Path, part: Part, harvest: Harvest) -> ShardInfo:
    """Writes a shard under another name and renames it."""
    from safetensors.torch import save_file

    records = harvest.records
    lengths = torch.tensor([0, *(len(record.tokens) for record in records)], dtype=torch.int64)
    tensors = {
        "tokens": torch.tensor([t for record in records for t in record.tokens], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([record.prompt_length for record in records], dtype=torch.int32),
        "temperature": torch.tensor([record.temperature for record in records], dtype=torch.float32),
        "loss_mask": torch.tensor([m for record in records for m in record.mask], dtype=torch.uint8),
    }
    facts = {
        "part": part.name(),
        "conversations": len(records),
        "tokens": len(tensors["tokens"]),
        "answer_tokens": int(tensors["loss_mask"].sum()),
        "prompts": harvest.written,
        "dropped": harvest.dropped,
        "cut": harvest.cut,
    }
    # One entry: several would come in another order every time, and a shard should have the same bytes.
    metadata = {"shard": json.dumps(facts, ensure_ascii=False, sort_keys=True)}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    info = read_shard(path)
    assert info is not None
    return info


def read_shard(path: Path) -> ShardInfo | None:
    """What a shard says of itself; None where there is none, or none that is whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = parse_json((file.metadata() or {})["shard"], str(path))
        counts = {name: int(facts[name]) for name in ("conversations", "tokens", "answer_tokens")}
        return ShardInfo(
            part=facts["part"],
            written=tuple(facts["prompts"]),
            dropped=Counter(facts["dropped"]),
            cut=int(facts.get("cut", 0)),  # older shards do not say
            **counts,
        )
    except (OSError, SafetensorError, EagleError, KeyError, TypeError, ValueError):
        return None


def read_data(folder: Path) -> dict[str, Any] | None:
    """data.json of a folder; None where the folder is not there or empty.

    Raises EagleError for a folder that holds something else, and for a data.json that cannot be read.
    """
    where = folder / DATA_FILE
    if not where.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise EagleError(
                f"{folder} holds files that are no training data; it is left alone",
                hint="choose another folder, or empty this one yourself",
                parameters=["out"],
            )
        return None
    data = read_json(where)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else type(data).__name__
        raise EagleError(f"{where}: expected version {VERSION} of the format, found {found}")
    return data


def write_data(folder: Path, data: Mapping[str, Any]) -> None:
    """Writes data.json under another name and renames it."""
    with whole_file(folder / DATA_FILE) as temporary:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
