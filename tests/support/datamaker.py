"""What the tests of `eagle-export data` share; fixtures are in conftest.py."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_export.data.conversations import Prompt
from eagle_export.data.converse import Harvest, Host
from eagle_export.data.generator import Generator, GeneratorOptions, Reply, open_generator
from eagle_export.data.openings import Openings, Section
from eagle_export.data.settings import DataSettings
from eagle_export.data.variety import Excluded, Seen
from support.decoding import Request

Outcome = namedtuple("Outcome", "code out err")
Cli = Callable[..., Outcome]
MAX_SEQ_LEN = 96
PROMPTS = (
    Prompt(("Hello", "And then?", "Why?")),
    Prompt(("What is a fjord?",)),
    Prompt(("Sing", "Again")),
    Prompt(("A much longer question, that has more words than the others have",)),
    Prompt(("b", "c")),
)


def load_shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def generator_of(target: Path, batch: int = 4) -> Generator:
    return open_generator(str(target), GeneratorOptions("cpu", "fp32", batch), MAX_SEQ_LEN, lambda _: None)


def host_of(generator: Generator, *, excluded: tuple[str, ...] = (), **options: object) -> Host:
    chosen = {"self_play": 1, "max_new_tokens": 12, "max_prompt_tokens": 80, "max_seq_len": MAX_SEQ_LEN}
    settings = DataSettings(**{**chosen, **options})  # type: ignore[arg-type]
    openings = Openings((Section("all", 1.0, ["Say {2-9} things about", "", "What is {2-99}?<end>"]),), {})
    return Host(generator, settings, openings, Seen(1.0), Excluded(excluded, 8), lambda _: None)


def answer(host: Host, prompts: tuple[Prompt, ...] = PROMPTS) -> Harvest:
    return host.answer_prompts(list(enumerate(prompts)))


def scripted(generator: Generator, monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[Request]:
    """Lets the generator say `answers`, one a wave to all; gives the requests that it gets."""
    asked: list[Request] = []
    script = iter(answers)

    def run(self: Generator, requests: list[Request], on_tokens: object) -> list[Reply]:
        asked.extend(requests)
        words = next(script) if requests else ""
        tokens = self.text.encode(words, add_special_tokens=False)
        stopped = tokens[-1:] == [1]
        return [Reply(list(tokens), "stop" if stopped else "length") for _ in requests]

    monkeypatch.setattr(Generator, "run", run)
    return asked
