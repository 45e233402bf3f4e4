"""Benchmark: datasets, the pairing of runs, the report, and how differences are found and judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import GREEDY, request_of, run

from eagle_run.bench import runner
from eagle_run.bench.mismatch import find_mismatch, next_logits
from eagle_run.bench.result import BenchResult
from eagle_run.bench.runner import bench
from eagle_run.datasets import Question, read_prompts, read_questions
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.engine.engine import Engine
from eagle_run.engine.offline import OfflineRun, run_offline
from eagle_run.errors import EagleError, UsageError
from eagle_run.llm import LLM
from eagle_run.params import SamplingParams

QUESTIONS = [
    Question("81", "writing", ("hello there", "and now?")),
    Question("82", "math", ("one and one",)),
    Question("83", "math", ("two",)),
]
TREE = TreeShape.dynamic(2, 2, 5)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle, threads=1)


@pytest.fixture(scope="module")
def engine(llm: LLM) -> Engine:
    return llm.engine


def measured(llm: LLM, questions: list[Question], max_tokens: int = 16, **options: Any) -> BenchResult:
    """A benchmark of TREE, greedy unless options say otherwise."""
    params = replace(options.pop("params", GREEDY), max_tokens=max_tokens)
    speculative = SpeculativeConfig(options.pop("tree", TREE), options.pop("rule", "topk"))
    return bench(llm, questions, params, speculative=speculative, **options)


def test_report_has_what_the_design_promises(llm: LLM) -> None:
    report = measured(llm, QUESTIONS).report(per_prompt=True)
    json.dumps(report)
    assert report["bundle"] == "tiny"
    assert report["prompts"] == 3
    assert report["tree"]["depth"] == 2
    assert report["identical_outputs"] == 1.0
    assert report["mismatches"] == []
    assert report["plain"]["tokens_per_second"] > 0
    speculative = report["speculative"]
    for key in (
        "tokens_per_second",
        "tokens_per_round",
        "acceptance_by_depth",
        "draft_ms",
        "verify_ms",
        "glue_ms",
    ):
        assert key in speculative
    assert report["plain"]["tokens"] == speculative["tokens"]
    ratio = speculative["tokens_per_second"] / report["plain"]["tokens_per_second"]
    assert report["speedup"] == pytest.approx(ratio, rel=1e-2)
    assert {"cpu", "cores", "threads", "torch", "onnxruntime"} <= set(report["environment"])
    assert [entry["ids"] for entry in report["per_prompt"]] == [["81"], ["81"], ["82"], ["83"]]


def test_order_alternates_and_warm_up_is_not_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def spy(engine: Engine, requests: Any, speculative: SpeculativeConfig) -> OfflineRun:
        order.append(speculative.tree.kind)
        return run_offline(engine, requests, speculative)

    monkeypatch.setattr(runner, "run_offline", spy)
    told: list[int] = []
    result = measured(llm, QUESTIONS[1:], 4, repeat=2, progress=lambda done, _: told.append(done))
    pair = ["plain", "dynamic"]
    assert order == pair + 2 * (pair + pair[::-1])
    assert told == [1, 2]
    assert [len(pair.plain) for pair in result.pairs] == [2, 2]
    assert result.report()["plain"]["tokens"] == 8


def test_later_turns_follow_the_first_answer(llm: LLM) -> None:
    result = measured(llm, QUESTIONS[:1], 8)
    first, second = result.pairs
    history = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": first.answers[0]},
        {"role": "user", "content": "and now?"},
    ]
    assert second.plain[0].metrics.prompt_tokens == len(request_of(llm.engine, history).prompt)


def test_turns_beyond_the_context_are_skipped_and_counted(llm: LLM) -> None:
    long = Question("9", "", ("x" * 120, "y" * 120))
    result = measured(llm, [long], 4)
    assert len(result.pairs) == 1
    assert result.report()["skipped_turns"] == 1
    with pytest.raises(EagleError, match="question 10 has"):
        measured(llm, [QUESTIONS[0], Question("10", "", ("x" * 300,))])


def test_batches_give_the_same_counts(tiny_bundle: Path, llm: LLM) -> None:
    together, alone = (measured(each, QUESTIONS, 12) for each in (LLM(tiny_bundle, threads=1, batch=2), llm))
    a, b = together.report()["speculative"], alone.report()["speculative"]
    assert a["acceptance_by_depth"] == b["acceptance_by_depth"]
    assert a["tokens"] == b["tokens"]
    assert together.identical_outputs == 1.0


def test_sampled_drafts_are_not_compared_token_by_token(llm: LLM) -> None:
    options: dict[str, Any] = {"tree": best_static(2, 2, 5), "rule": "sampled"}
    params = SamplingParams(temperature=1.0, seed=1)
    result = measured(llm, QUESTIONS[1:], 12, params=params, **options)
    assert result.identical_outputs is None
    assert result.report()["mismatches"] == []
    assert measured(llm, QUESTIONS[1:], 12, **options).identical_outputs == 1.0


def changed(run: OfflineRun, position: int, token: Callable[[int], int]) -> OfflineRun:
    """The run with another token in its first answer."""
    output = run.outputs[0]
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    tokens[position] = token(tokens[position])
    wrong = replace(output, outputs=(replace(completion, token_ids=tuple(tokens)),))
    return replace(run, outputs=[wrong, *run.outputs[1:]])


def test_a_difference_is_reported(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(engine: Engine, requests: Any, speculative: SpeculativeConfig) -> OfflineRun:
        run = run_offline(engine, requests, speculative)
        return changed(run, 2, lambda token: token + 1) if speculative.drafts else run

    monkeypatch.setattr(runner, "run_offline", wrong)
    result = measured(llm, QUESTIONS[1:], 6)
    assert result.identical_outputs == 0.0
    found = result.report()["mismatches"]
    assert [(entry["id"], entry["position"], entry["tie"]) for entry in found] == [
        ("82", 2, False),
        ("83", 2, False),
    ]
    assert all(entry["gap"] > 1e-3 for entry in found)


def test_a_run_that_does_not_repeat_itself_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))

    def unsteady(engine: Engine, requests: Any, speculative: SpeculativeConfig) -> OfflineRun:
        return changed(run_offline(engine, requests, speculative), 0, lambda _: next(count))

    monkeypatch.setattr(runner, "run_offline", unsteady)
    with pytest.raises(EagleError, match="second time"):
        measured(llm, QUESTIONS[1:], 4, repeat=2)


def test_nothing_to_measure(llm: LLM) -> None:
    with pytest.raises(UsageError):
        measured(llm, [])
    with pytest.raises(UsageError):
        measured(llm, QUESTIONS, repeat=0)


@pytest.mark.parametrize("length", [1, 7, 33])
def test_next_logits_are_those_of_decoding(engine: Engine, length: int) -> None:
    prompt = request_of(engine, "a prompt of more than one chunk, yes", raw=True).prompt[:length]
    logits = next_logits(engine.runner, prompt, chunk=engine.limits.prefill_chunk)
    request = request_of(engine, "x", max_new_tokens=1)
    token = run(engine, [replace(request, prompt=prompt)], TreeShape.plain()).token_ids[0][0]
    assert int(logits.argmax()) == token


def _compare(engine: Engine, tokens: Sequence[int], sampling: SamplingParams, changes: dict[int, int]) -> Any:
    request = request_of(engine, "hello there", sampling=sampling)
    other = [changes.get(place, token) for place, token in enumerate(tokens)]
    return find_mismatch(engine, request.offline, tokens, other)


def test_gap_at_temperature_zero_is_the_missing_logit(engine: Engine) -> None:
    request = request_of(engine, "hello there", max_new_tokens=6)
    tokens = run(engine, [request], TreeShape.plain()).token_ids[0]
    logits = next_logits(engine.runner, [*request.prompt, *tokens[:4]], chunk=16)
    second = int(logits.topk(2).indices[1])
    found = _compare(engine, tokens, SamplingParams(temperature=0), {4: second, 5: 0})
    assert (found.position, found.plain, found.speculative) == (4, tokens[4], second)
    assert found.gap == pytest.approx(float(logits.max() - logits[second]), rel=1e-5)
    assert _compare(engine, tokens, SamplingParams(temperature=0), {}) is None


def test_gap_above_zero_is_how_far_the_coin_lies_outside(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=11)
    request = request_of(engine, "hello there", sampling=sampling, max_new_tokens=6)
    tokens = run(engine, [request], TreeShape.plain()).token_ids[0]
    logits = next_logits(engine.runner, [*request.prompt, *tokens[:3]], chunk=16)
    kept = logits.topk(20).indices
    p = torch.zeros_like(logits).double()
    p[kept] = torch.softmax(logits[kept].double() / 0.8, -1)
    ids = [int(i) for i in sorted(kept.tolist())]
    place = ids.index(tokens[3])  # drawn here: its own interval holds the coin, so its own gap is zero
    beyond = ids[place + 2] if place + 2 < len(ids) else ids[place - 2]
    found = _compare(engine, tokens, sampling, {3: beyond})
    between = ids[place + 1] if beyond > tokens[3] else ids[place - 1]
    assert float(p[between]) - 1e-6 <= found.gap <= float(p[between] + p[tokens[3]]) + 1e-6


def test_an_answer_that_ends_early_has_no_gap(engine: Engine) -> None:
    request = request_of(engine, "hello there")
    found = find_mismatch(engine, request.offline, [5, 6], [5])
    assert found is not None
    assert (found.position, found.plain, found.speculative, found.gap, found.tie) == (1, 6, None, None, False)


def _write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8"
    )
    return path


def test_questions_from_a_file(tmp_path: Path) -> None:
    file = _write(
        tmp_path / "q.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        "",
        {"prompt": "c"},
        '"d"',
    )
    assert read_questions(file) == [
        Question("81", "writing", ("a",)),
        Question("3", "", ("c",)),
        Question("4", "", ("d",)),
    ]
    assert read_questions(file, limit=1, turns="all") == [Question("81", "writing", ("a", "b"))]
    assert read_prompts(file) == ["a", "c", "d"]
    chat = [{"role": "user", "content": "hi"}]
    assert read_prompts(_write(tmp_path / "m.jsonl", {"messages": chat})) == [chat]


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """JSON allows these unescaped inside a string, where str.splitlines would break."""
    prompt = "a\u2028b\u2029c\x85d"
    file = tmp_path / "q.jsonl"
    line = json.dumps({"prompt": prompt}, ensure_ascii=False)
    file.write_bytes(f'{line}\r\n"next"\n'.encode())
    assert read_prompts(file) == [prompt, "next"]
    assert [question.id for question in read_questions(file)] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not readable as JSON"),
        ('{"turns": ["\\ud800 x"]}', "line 2: the text is not valid Unicode"),
        ("[1]", "line 2: expected a string"),
        ({"turns": []}, "line 2"),
        ({"turns": [1]}, "line 2"),
        ({"turns": ["  "]}, "line 2.*empty"),
        ({"text": "x"}, "line 2"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    file = _write(tmp_path / "q.jsonl", {"turns": ["a"]}, line)
    with pytest.raises(EagleError, match=message):
        read_questions(file)
    with pytest.raises(EagleError, match=message):
        read_prompts(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(EagleError, match="no questions"):
        read_questions(_write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["caf\xe9"]}')
    with pytest.raises(EagleError, match="byte 0xe9 at offset 15"):
        read_questions(tmp_path / "latin.jsonl")


def test_an_interrupted_run_goes_on_and_ends_the_same(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is not measured again; a line that was cut is."""
    file, count = tmp_path / "progress.jsonl", iter(range(100))

    def interrupted(*arguments: Any) -> OfflineRun:
        if next(count) == 2 + 2 * 2 + 1:  # in the middle of the third pair
            raise KeyboardInterrupt
        return run_offline(*arguments)

    monkeypatch.setattr(runner, "run_offline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(llm, QUESTIONS, 8, resume=file)
    with file.open("a") as stream:
        stream.write('{"key": "cut in the mid')
    runs: list[object] = []

    def counted(*arguments: Any) -> OfflineRun:
        runs.append(arguments)
        return run_offline(*arguments)

    monkeypatch.setattr(runner, "run_offline", counted)
    resumed = measured(llm, QUESTIONS, 8, resume=file).report(per_prompt=True)
    assert len(runs) == 2 + 2 * 2
    again = measured(llm, QUESTIONS, 8, resume=file).report(per_prompt=True)
    assert len(runs) == 2 + 2 * 2 + 2  # nothing but a warm-up
    assert again == resumed
    whole = measured(llm, QUESTIONS, 8).report(per_prompt=True)
    for name in ("ids", "turn", "tokens", "tokens_per_round", "identical"):
        assert [e[name] for e in resumed["per_prompt"]] == [e[name] for e in whole["per_prompt"]]


@pytest.mark.parametrize("content", ["", "{}\n", '{"benchmark": 3}\n', "no json\n"])
def test_a_file_that_is_no_benchmarks(llm: LLM, tmp_path: Path, content: str) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text(content)
    if not content:
        assert len(measured(llm, QUESTIONS[1:2], 4, resume=file).pairs) == 1
        return
    with pytest.raises(EagleError):
        measured(llm, QUESTIONS[1:2], 4, resume=file)
    assert file.read_text() == content


def test_a_file_of_another_benchmark_is_refused(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    measured(llm, QUESTIONS[1:2], 4, resume=file)
    with pytest.raises(EagleError, match="of another benchmark: params differ"):
        measured(llm, QUESTIONS[1:2], 5, resume=file)
    with pytest.raises(EagleError, match="of another benchmark: speculative, repeat differ"):
        measured(llm, QUESTIONS[1:2], 4, resume=file, tree=TreeShape.chain(1), repeat=2)
