"""A real model in fp8: a draft changes no token, although a last bit would change many."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.decoding import Request, request_of, run

from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.params import SamplingParams

pytestmark = pytest.mark.real
TEXTS = ("Describe a lighthouse in two sentences.", "What is 12 times 13?")


@pytest.fixture(scope="module")
def engine(smollm2_fp8: Path) -> Engine:
    return load_engine(smollm2_fp8)


def requests(engine: Engine, temperature: float) -> list[Request]:
    sampling = SamplingParams(temperature=temperature, seed=11)
    return [request_of(engine, text, max_new_tokens=32, sampling=sampling) for text in TEXTS]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[float, list[tuple[int, ...]]]:
    """Temperature -> the tokens of each answer, decoded plainly."""
    return {
        temperature: [
            run(engine, [request], TreeShape.plain()).token_ids[0]
            for request in requests(engine, temperature)
        ]
        for temperature in (0.0, 1.0)
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_chain_changes_no_token(
    engine: Engine, plain: dict[float, list[tuple[int, ...]]], temperature: float, depth: int
) -> None:
    """Bit for bit: every forward has two rows or more, and the rows of a chain lie side by side."""
    for request, tokens in zip(requests(engine, temperature), plain[temperature], strict=True):
        drafted = run(engine, [request], TreeShape.chain(depth))
        assert drafted.token_ids == [tokens]
        assert drafted.metrics.tokens_per_round > 1


def test_side_by_side_changes_no_token(engine: Engine, plain: dict[float, list[tuple[int, ...]]]) -> None:
    """Attention has its kernel for a single row a slot, however many slots there are."""
    together = load_engine(engine.bundle.path, batch=2)
    assert run(together, requests(engine, 1.0), TreeShape.plain()).token_ids == plain[1.0]


def test_one_row_alone_is_another_model(engine: Engine, plain: dict[float, list[tuple[int, ...]]]) -> None:
    """Why the row is added: without it plain decoding parts from the draft's answers."""
    parted = 0
    for request, with_two in zip(requests(engine, 0.0), plain[0.0], strict=True):
        alone = load_engine(engine.bundle.path)
        alone.runner.graphs["target"] = alone.runner.graphs["target"].graph
        parted += run(alone, [request], TreeShape.plain()).token_ids != [with_two]
    if not parted:
        pytest.skip("this CPU sums one row as it sums several")
