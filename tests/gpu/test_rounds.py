"""Captured rounds on a GPU: the tokens of the called ones, with no wait and no new capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.decoding import Request, run

from eagle_run.backends.stream import on_stream, wait
from eagle_run.bench.mismatch import find_mismatch
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.sampling import stack
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.engine import Engine
from eagle_run.engine.prefill import prefill
from eagle_run.engine.round import run_round
from eagle_run.engine.validation import EngineLimits
from eagle_run.params import SamplingParams

pytestmark = pytest.mark.gpu

SHAPES = {
    "plain": TreeShape.plain(),
    "chain": TreeShape.chain(3),
    "static": TreeShape.static((-1, 0, 0, 1, 1, 2)),
    "dynamic": TreeShape.dynamic(3, 3, 10),
}
SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=5),
}


def make_engine(setup: Any, batch: int, *, capture: bool = True, async_scheduling: bool = True) -> Engine:
    runner, _ = setup.runner(batch)
    return Engine(
        runner,
        EngineLimits(setup.max_seq_len, setup.chunk),
        async_scheduling=async_scheduling,
        cuda_graphs=CudaGraphRunner(runner.device, enabled=capture),
    )


def make_requests(setup: Any, count: int, sampling: SamplingParams, tokens: int = 24) -> list[Request]:
    return [
        Request(prompt, replace(sampling, seed=(sampling.seed or 0) + i), max_new_tokens=tokens)
        for i, prompt in enumerate(setup.prompts(count, 20))
    ]


def answers(engine: Engine, requests: list[Request], shape: TreeShape, **options: Any) -> list[Any]:
    return run(engine, requests, shape, **options).token_ids


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("name", "rule"), [*((name, "topk") for name in SHAPES), ("chain", "sampled"), ("static", "sampled")]
)
def test_captured_rounds_are_the_called_ones(
    setup: Any, name: str, rule: str, settings: str, batch: int
) -> None:
    requests = make_requests(setup, batch, SETTINGS[settings])
    called = answers(make_engine(setup, batch, capture=False), requests, SHAPES[name], rule=rule)
    engine = make_engine(setup, batch)
    assert answers(engine, requests, SHAPES[name], rule=rule) == called
    assert answers(engine, requests, SHAPES[name], rule=rule) == called  # by replays alone
    assert engine.cuda_graphs.replays > engine.cuda_graphs.calls > 0
    assert all(len(tokens) == 24 for tokens in called)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["chain", "static", "dynamic"])
def test_a_tree_gives_the_tokens_of_plain_decoding(setup: Any, name: str, settings: str) -> None:
    requests = make_requests(setup, 3, SETTINGS[settings])
    engine = make_engine(setup, 3)
    plain = answers(engine, requests, SHAPES["plain"])
    tree = answers(engine, requests, SHAPES[name])
    for request, a, b in zip(requests, plain, tree, strict=True):
        found = find_mismatch(engine, request.offline, a, b)
        assert found is None or found.tie, found


@pytest.mark.parametrize("name", ["plain", "dynamic"])
def test_running_ahead_changes_no_token(setup: Any, name: str) -> None:
    """Also where slots end in the middle of others, at different lengths, and take new requests."""
    requests = [
        replace(request, max_new_tokens=5 + 4 * i)
        for i, request in enumerate(make_requests(setup, 5, SETTINGS["sampled"]))
    ]
    want = answers(make_engine(setup, 2, async_scheduling=False), requests, SHAPES[name])
    assert answers(make_engine(setup, 2, async_scheduling=True), requests, SHAPES[name]) == want
    assert [len(tokens) for tokens in want] == [request.max_new_tokens for request in requests]


def test_a_stop_token_ends_an_answer_that_ran_ahead(setup: Any) -> None:
    engine = make_engine(setup, 1)
    (request,) = make_requests(setup, 1, SETTINGS["greedy"])
    (whole,) = answers(engine, [request], SHAPES["dynamic"])
    stop = whole[10]
    stopping = replace(request, stop_tokens=frozenset({stop}))
    assert answers(engine, [stopping], SHAPES["dynamic"]) == [whole[: whole.index(stop) + 1]]


def test_slots_that_take_new_requests_answer_as_alone(setup: Any) -> None:
    requests = make_requests(setup, 5, SETTINGS["greedy"])
    together = answers(make_engine(setup, 2), requests, SHAPES["dynamic"])
    one = make_engine(setup, 1)
    for request, tokens in zip(requests, together, strict=True):
        (alone,) = answers(one, [request], SHAPES["dynamic"])
        found = find_mismatch(one, request.offline, alone, tokens)
        assert found is None or found.tie, found


def test_another_temperature_needs_no_capture(setup: Any) -> None:
    engine = make_engine(setup, 2)
    first, second = (
        make_requests(setup, 2, SamplingParams(temperature=temperature, top_p=top_p, seed=seed))
        for temperature, top_p, seed in ((1.0, 0.9, 1), (0.6, 0.7, 9))
    )
    for _ in range(2):
        answers(engine, first, SHAPES["chain"])
    captured = engine.cuda_graphs.captured
    found = answers(engine, second, SHAPES["chain"])
    assert set(engine.cuda_graphs.captured) == set(captured)
    assert found == answers(make_engine(setup, 2, capture=False), second, SHAPES["chain"])


def test_a_round_waits_for_nothing(setup: Any, device: torch.device) -> None:
    """What the fake-tensor test says of reads, asked of CUDA itself: a wait inside a round raises."""
    runner, _ = setup.runner(2)
    speculative = SpeculativeConfig(SHAPES["dynamic"])
    greedy = stack([SETTINGS["greedy"]] * 2, runner.device)
    state = runner.new_state(speculative.path_rows, greedy)
    with on_stream(device):
        for slot, prompt in enumerate(setup.prompts(2, 20)):
            prefill(runner, state, slot, prompt, chunk=setup.chunk)
        run_round(runner, state, speculative, kv=128)  # buffers and tables are made
        wait(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_round(runner, state, speculative, kv=128)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    wait(device)
    assert bool((state.length > 19 - 4).all())


def test_graphs_are_kept_up_to_a_number_and_counted(device: torch.device) -> None:
    total = torch.zeros(1, device=device)
    big = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize(device)

    def add(amount: float) -> None:
        total.add_((big + amount).amax())  # takes memory while it runs

    rounds = CudaGraphRunner(device, most=2)
    for _ in range(3):
        for amount in (1.0, 10.0):
            rounds.run(amount, lambda amount=amount: add(amount))  # type: ignore[misc]
    wait(device)
    assert float(total) == 33
    assert (rounds.calls, rounds.replays) == (2, 4)
    assert rounds.captured == (1.0, 10.0)
    assert rounds.memory_bytes >= 0
    for _ in range(2):
        rounds.run(100.0, lambda: add(100.0))
    wait(device)
    assert float(total) == 233
    assert rounds.captured == (10.0, 100.0)  # the oldest made room
    rounds.clear()
    assert rounds.captured == ()
    rounds.run(1.0, lambda: add(1.0))
    wait(device)
    assert float(total) == 234
