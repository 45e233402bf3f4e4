"""Answers that fall into a loop end there: the same conversations, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.datamaker import Cli, shard_bytes

from eagle_export.data import converse
from eagle_export.data.conversations import Prompt
from eagle_export.data.converse import Harvest, Host
from eagle_export.data.generator import Generator, GeneratorOptions, open_generator
from eagle_export.data.openings import Openings
from eagle_export.data.quality import loop_criterion
from eagle_export.data.settings import DataSettings
from eagle_export.data.variety import Excluded, Seen
from eagle_run.decoding.config import PLAIN
from eagle_run.engine.offline import OfflineRequest, run_offline
from eagle_run.params import SamplingParams

LENGTH, NEW = 250, 220
PROMPTS = [(number, Prompt((f"q{number}",))) for number in range(8)]
MIX = ((0.0, 0.5), (0.25, 0.5))


def never() -> Callable[[int], bool]:
    """An `until` of answers that run to their full length."""
    return lambda _: False


def long_generator(target: Path, batch: int) -> Generator:
    return open_generator(str(target), GeneratorOptions("cpu", "fp32", batch), LENGTH, lambda _: None)


def harvest_of(generator: Generator, loops: str) -> tuple[Harvest, int]:
    """Conversations, and how many tokens were decoded for them."""
    settings = DataSettings(max_new_tokens=NEW, max_seq_len=LENGTH, loops=loops, temperatures=MIX)
    counted: list[int] = []
    host = Host(generator, settings, Openings((), {}), Seen(1.0), Excluded((), 8), counted.append)
    return host.answer_prompts(PROMPTS), sum(counted)


@pytest.mark.slow
@pytest.mark.parametrize("loops", ["cut", "drop", "keep"])
def test_answers_that_end_in_their_loop_are_those_cut_afterwards(
    loops: str, talking_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, greedy and sampled, whatever the batch."""
    with monkeypatch.context() as patch:
        patch.setattr(converse, "loop_criterion", never)
        expected, whole = harvest_of(long_generator(talking_target, 4), loops)
    found = [harvest_of(long_generator(talking_target, batch), loops) for batch in (1, 3, 8)]
    assert [harvest for harvest, _ in found] == [expected] * 3
    tokens = {count for _, count in found}
    assert tokens == {whole} if loops == "keep" else max(tokens) < 0.8 * whole
    looped = expected.cut if loops == "cut" else expected.dropped["answer in a loop"]
    assert looped == 0 if loops == "keep" else looped >= 4
    assert {record.temperature for record in expected.records} >= {0.25}


def test_a_slot_whose_answer_ends_in_a_loop_takes_the_next(talking_target: Path) -> None:
    generator = long_generator(talking_target, 2)
    params = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False)
    encode = generator.text.encode_chat
    asked = [
        OfflineRequest(tuple(encode([{"role": "user", "content": prompt.turns[0]}])), params, loop_criterion)
        for _, prompt in PROMPTS
    ]
    done = run_offline(generator.engine, asked, PLAIN)
    assert {output.outputs[0].finish_reason for output in done.outputs} == {"stop"}
    lengths = [len(tokens) for tokens in done.token_ids]
    assert max(lengths) < NEW
    free = [0, 0]  # by slot: the step at which it takes the next request
    for length in lengths:
        free[free.index(min(free))] += length
    assert done.metrics.steps == max(free)
    again = generator.run(asked, lambda _: None)  # nothing of the first run is left in the requests
    assert [len(reply.tokens) for reply in again] == lengths


def test_what_was_cut_is_counted(cli: Cli, talking_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt.turns[0]}) + "\n" for _, prompt in PROMPTS))
    options = ["--max-seq-len", LENGTH, "--max-prompt-tokens", 64, "--max-new-tokens", NEW, "--top-k", 0]
    options += ["--temperature", 0, "--loops", "cut", "--precision", "fp32", "--shard-size", 5]
    out = tmp_path / "data"
    outcome = cli("data", talking_target, "--prompts", prompts, *options, "--out", out)
    assert outcome.code == 0, outcome.err
    assert "5 conversations, 0 dropped, 5 cut" in outcome.err
    data = json.loads((out / "data.json").read_text())
    assert data["counts"]["cut"] == 8
    assert [shard["cut"] for shard in data["shards"]] == [5, 3]
    (out / "00001.safetensors").unlink()
    first = shard_bytes(out)
    again = cli("data", talking_target, "--prompts", prompts, *options, "--batch", 2, "--out", out)
    assert again.code == 0, again.err
    assert json.loads((out / "data.json").read_text())["counts"] == data["counts"]
    assert shard_bytes(out).items() >= first.items()


def test_a_loop_of_blanks_is_an_empty_answer(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes after it: when the answer ends in its loop, nobody knows."""
    from support.datamaker import answer, host_of, scripted

    for loops in ("cut", "drop"):
        scripted(generator, monkeypatch, " " * 30 + "and words</s>", "never asked")
        harvest = answer(host_of(generator, loops=loops), (Prompt(("Hello",)),))
        assert dict(harvest.dropped) == {"empty answer": 1}
        assert (harvest.records, harvest.cut) == ([], 0)
