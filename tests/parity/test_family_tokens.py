"""Bundles of families with windows, sinks and experts: built, and decoded plainly and in trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import Request, run
from support.familymaker import WINDOW
from support.targetmaker import make_model
from support.tiny import build_bundle, write_head, write_tokenizer

from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.loading import load_engine
from eagle_run.params import SamplingParams

PROMPT = (5, 9, 60, 33, 12, 7, 90, 41, 22, 17)
TOKENS = 14
assert len(PROMPT) > WINDOW


@dataclass(frozen=True)
class Built:
    """Transformers' model, and the bundle that was made of it."""

    model: Any
    bundle: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    made: dict[str, Built] = {}

    def get(kind: str) -> Built:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = make_model(kind)
            model.generation_config.eos_token_id = None
            model.config.eos_token_id = None
            model.save_pretrained(folder / "target")
            write_tokenizer(folder / "target", model.config.vocab_size)
            head = write_head(folder / "head", folder / "target", good=False)
            made[kind] = Built(model, build_bundle(folder / "target", head, folder / "bundle"))
        return made[kind]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt-oss", "gemma3", "qwen3-moe", "llama4"])
def test_trees_answer_as_plain_decoding_and_transformers_do(kind: str, built: Callable[[str], Built]) -> None:
    found = built(kind)
    engine = load_engine(found.bundle, threads=1)
    greedy = Request(PROMPT, max_new_tokens=TOKENS)
    sampled = Request(PROMPT, max_new_tokens=TOKENS, sampling=SamplingParams(temperature=0.8, seed=3))
    plain = [run(engine, [request], TreeShape.plain()).token_ids[0] for request in (greedy, sampled)]
    for shape in (TreeShape.dynamic(3, 3, 10), TreeShape.chain(4)):
        for request, tokens in zip((greedy, sampled), plain, strict=True):
            assert run(engine, [request], shape).token_ids[0] == tokens, shape
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):  # without a cache, the slow way
            logits = found.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    assert list(plain[0]) == tokens[len(PROMPT) :]
