"""eagle-run as its users meet it: output, exit codes, and what bad input gets."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.decoding import answers_of, request_of
from support.tinybundle import MAX_SEQ_LEN, make_bundle

from eagle_run.bench import mismatch
from eagle_run.bench.mismatch import Mismatch
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine import offline
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.engine.offline import OfflineRun, run_offline
from eagle_run.outputs import RequestOutput
from eagle_run.tuning import tree_tuning as tune

COMMANDS = ("generate", "chat", "bench")


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> str:
    """What plain decoding answers to "hello" in 30 tokens."""
    engine = load_engine(tiny_bundle, threads=1)
    return answers_of(engine, [request_of(engine, "hello", max_new_tokens=30)], TreeShape.plain())[0].text


def process(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from eagle_run.cli.main import main; main()", *map(str, arguments)]


# Help


def test_help_names_what_there_is(eagle_run: Any) -> None:
    shown = [eagle_run(*command, "--help") for command in ([], ["generate"], ["chat"], ["bench"])]
    assert [(done.code, done.err) for done in shown] == [(0, "")] * 4
    text = "".join(done.out for done in shown)
    for word in (*COMMANDS, "--tree", "--dataset", "num_speculative_tokens", "/reset"):
        assert word in text


def test_version(eagle_run: Any) -> None:
    assert eagle_run("--version").out.startswith("eagle-run 0.")


# generate


def test_generate_streams_text_and_ends_with_statistics(
    eagle_run: Any, tiny_bundle: Path, expected: str
) -> None:
    result = eagle_run("generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30)
    assert result.code == 0
    assert result.out.rstrip("\n") == expected.rstrip("\n")
    assert len(result.err.strip().splitlines()) == 1
    for part in ("30 tokens at", "tokens/s", "tokens per round", "dynamic tree of 8 nodes"):
        assert part in result.err


@pytest.mark.parametrize(
    "tree",
    [
        ["--tree", "plain"],
        ["--tree", "chain:2"],
        ["--tree", "chain", "--depth", "4"],
        ["--tree", "dynamic", "--depth", "2", "--branch", "2", "--nodes", "5"],
        ["--tree", "dynamic:3,4,20"],
        ["--tree", "static", "--nodes", "6"],
        ["--parents", "0,0,1,1"],
        ["--draft", "sampled"],
    ],
)
def test_every_tree_gives_the_same_text(
    eagle_run: Any, tiny_bundle: Path, expected: str, tree: list[str]
) -> None:
    result = eagle_run("generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30, *tree)
    assert (result.code, result.out.rstrip("\n")) == (0, expected.rstrip("\n"))


def test_json_is_one_object(eagle_run: Any, tiny_bundle: Path, expected: str) -> None:
    result = eagle_run("generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30, "--json")
    answer = json.loads(result.out)
    assert answer["text"] == expected
    assert (answer["tree"], answer["finish_reason"], len(answer["tokens"])) == ("dynamic:3,3,8", "length", 30)
    assert answer["statistics"]["rounds"] > 0
    assert "compare" not in answer


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.9", "--top-p", "0.9", "--seed", "4"]])
def test_compare_proves_that_nothing_changed(eagle_run: Any, tiny_bundle: Path, sampling: list[str]) -> None:
    arguments = ["generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30, "--compare", *sampling]
    result = eagle_run(*arguments)
    assert "speed-up" in result.err
    assert "tokens identical to plain decoding" in result.err
    compare = json.loads(eagle_run(*arguments, "--json").out)["compare"]
    assert compare["identical"] is True
    assert compare["speedup"] > 0


def test_compare_does_not_hide_a_difference(
    eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(engine: Engine, requests: Any, speculative: SpeculativeConfig, **options: Any) -> OfflineRun:
        done = run_offline(engine, requests, speculative, **options)
        if speculative.drafts:
            return done
        output = done.outputs[0]
        tokens = list(output.outputs[0].token_ids)
        tokens[3] += 1
        changed = replace(output, outputs=(replace(output.outputs[0], token_ids=tuple(tokens)),))
        return replace(done, outputs=[changed])

    monkeypatch.setattr(offline, "run_offline", wrong)
    arguments = ["generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 10, "--compare"]
    result = eagle_run(*arguments)
    assert "answer 0 differs from plain decoding at token 3" in result.err
    assert "NOT a tie" in result.err
    assert "1 answers DIFFER" in result.err
    assert "error: 1 of 1 answers differ from plain decoding, and not by a tie" in result.err
    assert result.code == 1
    assert len(result.out) > 4  # the answer is there all the same
    compare = json.loads(eagle_run(*arguments, "--json").out)["compare"]
    assert (compare["identical"], compare["mismatch"]["position"]) == (False, 3)


def test_a_tie_is_reported_but_no_fault(
    eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tie = Mismatch(2, 1, 5, gap=1e-6, tie=True)
    monkeypatch.setattr(mismatch, "find_mismatch", lambda *_, **__: tie)
    result = eagle_run("generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 4, "--compare")
    assert "a tie that rounding decided" in result.err
    assert (result.code, "error" in result.err) == (0, False)


def test_seed_decides_the_text(eagle_run: Any, tiny_bundle: Path) -> None:
    def text(seed: int) -> str:
        return str(
            eagle_run("generate", tiny_bundle, "--prompt", "x", "--temperature", 1, "--seed", seed).out
        )

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_sampled_drafts_claim_no_identity(
    eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("compared answers that need not be equal")

    monkeypatch.setattr(mismatch, "find_mismatch", fail)
    result = eagle_run(
        "generate",
        tiny_bundle,
        "--prompt",
        "x",
        "--temperature",
        1,
        "--draft",
        "sampled",
        "--compare",
        "--json",
    )
    assert result.code == 0
    compare = json.loads(result.out)["compare"]
    assert (compare["identical"], compare["mismatch"]) == (None, None)
    assert "identical" not in result.err
    assert "differs" not in result.err


def test_several_prompts_in_a_batch_are_what_they_are_alone(
    eagle_run: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    prompts = ["one", "two and more", "three"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    options = ["--max-new-tokens", 12, "--json", "--compare"]
    together = eagle_run("generate", tiny_bundle, "--prompts", file, "--batch", 2, *options)
    answers = [json.loads(line) for line in together.out.splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert all(answer["compare"]["identical"] for answer in answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = eagle_run("generate", tiny_bundle, "--prompt", prompt, *options)
        assert json.loads(alone.out)["tokens"] == answer["tokens"]


def test_several_answers_are_labelled_in_order(eagle_run: Any, tiny_bundle: Path) -> None:
    repeated = [argument for prompt in ("a", "b", "c") for argument in ("--prompt", prompt)]
    result = eagle_run("generate", tiny_bundle, *repeated, "--batch", 3, "--max-new-tokens", 4)
    labels = [line[:3] for line in result.out.splitlines() if line.startswith("[")]
    assert labels == ["[0]", "[1]", "[2]"]


def test_stop_raw_and_system(eagle_run: Any, tiny_bundle: Path, expected: str) -> None:
    stop = expected[8:11]
    at = expected.find(stop)
    arguments = ["generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30, "--json"]
    answer = json.loads(eagle_run(*arguments, "--stop", stop).out)
    assert (answer["text"], answer["finish_reason"]) == (expected[:at], "stop")
    assert json.loads(eagle_run(*arguments, "--raw").out)["prompt_tokens"] == 5
    assert json.loads(eagle_run(*arguments, "--system", "s").out)["prompt_tokens"] > 30


@pytest.mark.parametrize("arguments", [[], ["--prompt", "-"], ["--prompt-file", "-"]])
def test_prompt_from_stdin(
    eagle_run: Any, tiny_bundle: Path, stdin: Any, expected: str, arguments: list[str]
) -> None:
    stdin(b"hello")
    result = eagle_run("generate", tiny_bundle, "--max-new-tokens", 30, *arguments)
    assert (result.code, result.out.rstrip("\n")) == (0, expected.rstrip("\n"))


def test_auto_tree_says_what_it_picked(
    eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "tune", lambda *_, **__: tune.Choice(TreeShape.chain(1), 1.4, "it was faster"))
    arguments = [
        "generate",
        tiny_bundle,
        "--prompt",
        "x",
        "--max-new-tokens",
        4,
        "--tree",
        "auto",
        "--retune",
    ]
    result = eagle_run(*arguments)
    assert "tree auto: chain of 1: it was faster (chain:1)" in result.err
    assert eagle_run(*arguments, "--depth", 2).code == 2


# Ends


def test_an_interrupt_keeps_what_was_printed(
    eagle_run: Any, tiny_bundle: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, iter(range(100))

    def interrupted(self: Engine) -> list[RequestOutput]:
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = eagle_run("generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30)
    assert result.code == 130
    shown = result.out.rstrip("\n")
    assert shown
    assert expected.startswith(shown)
    assert "tokens/s" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("after", "finished"), [(0, 0), (5, 0), (14, 1)])
def test_an_interrupt_under_json_prints_what_there_is(
    eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, after: int, finished: int
) -> None:
    """Finished answers as always, those that had begun marked, and one line at least."""
    step, steps = Engine.step, iter(range(1000))

    def interrupted(self: Engine) -> list[RequestOutput]:
        if next(steps) == after:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    prompts = ("--prompt", "hello", "--prompt", "you", "--tree", "plain", "--max-tokens", 10)
    result = eagle_run("generate", tiny_bundle, *prompts, "--json")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 130
    assert [line.get("interrupted", False) for line in lines] == [False] * finished + [True]
    assert all(len(line["tokens"]) == 10 for line in lines[:finished])
    if after:
        assert lines[-1]["tokens"]
        assert lines[-1]["finish_reason"] is None
    assert "Traceback" not in result.err


def test_a_reader_that_leaves_is_no_fault(tiny_bundle: Path) -> None:
    command = process("generate", tiny_bundle, "--prompt", "hello", "--ignore-eos", "--threads", 1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        errors = child.stderr.read().decode()
    assert child.returncode == 1
    assert "Traceback" not in errors
    assert "Exception" not in errors


def test_prompt_longer_than_the_context(eagle_run: Any, tiny_bundle: Path) -> None:
    result = eagle_run("generate", tiny_bundle, "--prompt", "x" * 300)
    assert (result.code, result.out) == (1, "")
    assert f"the bundle's context is {MAX_SEQ_LEN}" in result.err


@pytest.mark.parametrize("more", [[], ["--compare"], ["--batch", "2"]])
def test_a_long_prompt_is_found_before_anything_is_decoded(
    eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    decoded: list[object] = []
    monkeypatch.setattr(Engine, "step", lambda *arguments: decoded.append(arguments))
    prompts = [part for text in ("a", "b", "c", "x" * 300) for part in ("--prompt", text)]
    result = eagle_run("generate", tiny_bundle, *prompts, *more)
    assert (result.code, result.out, decoded) == (1, "", [])
    assert "prompt 3: the prompt has" in result.err


def test_an_answer_that_fills_the_context_ends_with_length(eagle_run: Any, tiny_bundle: Path) -> None:
    arguments = ["--prompt", "x" * 150, "--ignore-eos", "--max-new-tokens", 1000, "--json"]
    answer = json.loads(eagle_run("generate", tiny_bundle, *arguments).out)
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] + len(answer["tokens"]) == MAX_SEQ_LEN


# Bad input


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", ""], 1, "the prompt is empty"),
        (["--prompt", "  \n"], 1, "the prompt is empty"),
        (["--prompt", "\udcff"], 1, "not valid UTF-8"),
        (["--prompt-file", "/does/not/exist"], 1, "cannot be read"),
        (["--prompts", "/does/not/exist"], 1, "cannot be read"),
        (["--prompt", "x", "--prompts", "y"], 2, "exclude each other"),
        (["--prompt", "x", "--colour"], 2, "--colour"),
        (["--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["--prompt", "x", "--temperature", "warm"], 2, "warm"),
        (["--prompt", "x", "--top-p", "0"], 2, "top_p"),
        (["--prompt", "x", "--max-new-tokens", "0"], 2, "max_tokens"),
        (["--prompt", "x", "--stop", ""], 2, "stop should be texts of at least one character"),
        (["--prompt", "x", "--batch", "9"], 2, "built for 1 to 4"),
        (["--prompt", "x", "--tree", "oak"], 2, "neither a tree nor a file"),
        (["--prompt", "x", "--tree", "chain", "--depth", "0"], 2, "depth"),
        (["--prompt", "x", "--tree", "dynamic:2,2,50"], 2, "needs 49 candidates"),
        (["--prompt", "x", "--tree", "dynamic:9,9,400"], 2, "built for 64"),
        (["--prompt", "x", "--tree", "dynamic:2,2,5", "--draft", "sampled"], 2, "static tree or a chain"),
        (["--prompt", "x", "--draft", "sampled", "--tree", "dynamic"], 2, "static tree or a chain"),
        (["--prompt", "x", "--retune"], 2, "--retune measures for --tree auto"),
        (["--prompt", "x", "--retune", "--tree", "chain:2"], 2, "--retune measures for --tree auto"),
    ],
)
def test_bad_input(eagle_run: Any, tiny_bundle: Path, arguments: list[str], code: int, message: str) -> None:
    result = eagle_run("generate", tiny_bundle, *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("options", [["--retune"], ["--draft", "sampled", "--tree", "dynamic:2,2,5"]])
def test_options_are_checked_before_the_bundle_is_loaded(eagle_run: Any, options: list[str]) -> None:
    assert eagle_run("generate", "/does/not/exist", "--prompt", "x", *options).code == 2


def test_invalid_utf8_on_stdin(eagle_run: Any, tiny_bundle: Path, stdin: Any) -> None:
    stdin(b"caf\xe9")
    result = eagle_run("generate", tiny_bundle)
    assert (result.code, result.out) == (1, "")
    assert "standard input is not UTF-8: byte 0xe9 at offset 3" in result.err


def test_no_prompt_at_a_terminal(eagle_run: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    result = eagle_run("generate", tiny_bundle)
    assert (result.code, "no prompt" in result.err) == (2, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_bundle(eagle_run: Any, tmp_path: Path, command: str) -> None:
    data = tmp_path / "q.jsonl"
    data.write_text('{"turns": ["x"]}')
    more = {"generate": ["--prompt", "x"], "bench": ["--dataset", str(data)], "chat": []}[command]
    result = eagle_run(command, tmp_path, *more)
    assert (result.code, result.out) == (1, "")
    assert "is not a bundle" in result.err
    assert "hint:" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in eagle_run(command, tmp_path, *more, "--debug").err


def test_a_bundle_without_head(eagle_run: Any, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bare", head=False)
    assert "plain decoding" in eagle_run("generate", bundle, "--prompt", "x", "--max-new-tokens", 4).err
    result = eagle_run("generate", bundle, "--prompt", "x", "--tree", "chain:2")
    assert (result.code, "no draft head" in result.err) == (2, True)


# chat


def test_chat_keeps_the_conversation(eagle_run: Any, tiny_bundle: Path, stdin: Any) -> None:
    stdin(b"hello\n\nand?\n/stats\n/reset\nhello\n/colour\n/exit\nnever read\n")
    result = eagle_run("chat", tiny_bundle, "--max-new-tokens", 12)
    assert result.code == 0
    engine = load_engine(tiny_bundle, threads=1)

    def text(prompt: Any) -> str:
        return answers_of(engine, [request_of(engine, prompt, max_new_tokens=12)], TreeShape.plain())[0].text

    first = text("hello")
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and?"},
    ]
    second = text(history)
    assert result.out == f"{first}\n{second}\n{first}\n"
    assert "2 answers, 24 tokens" in result.err
    assert "a new conversation" in result.err
    assert "unknown command /colour" in result.err


def test_chat_says_when_the_context_is_full(eagle_run: Any, tiny_bundle: Path, stdin: Any) -> None:
    stdin(b"y" * 400 + b"\n" + b"x" * 150 + b"\nmore\n/reset\nhi\n")
    result = eagle_run("chat", tiny_bundle, "--max-new-tokens", 100)
    assert result.code == 0
    assert f"the context holds {MAX_SEQ_LEN}" in result.err
    assert "is full: the answer ends here" in result.err
    assert (
        result.err.count("/reset begins a new one") == 2
    )  # the first message, and the one after it was full


def test_ctrl_c_stops_the_answer_not_the_chat(
    eagle_run: Any, tiny_bundle: Path, stdin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, []

    def interrupted(self: Engine) -> list[RequestOutput]:
        steps.append(self)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    stdin(b"hello\nagain\n")
    result = eagle_run("chat", tiny_bundle, "--max-new-tokens", 30)
    assert result.code == 0
    assert "(stopped)" in result.err
    assert len(steps) > 4  # the second answer


def test_chat_refuses_text_that_is_not_utf8(eagle_run: Any, tiny_bundle: Path, stdin: Any) -> None:
    stdin(b"caf\xe9\n")
    result = eagle_run("chat", tiny_bundle)
    assert (result.code, "not UTF-8" in result.err) == (1, True)


# bench


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    file = tmp_path / "set.jsonl"
    lines = [{"question_id": i, "category": "c", "turns": [f"question {i}", "and then?"]} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_bench_prints_and_writes_the_report(
    eagle_run: Any, tiny_bundle: Path, dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = eagle_run(
        "bench", tiny_bundle, "--dataset", dataset, "--limit", 2, "--max-new-tokens", 8, "--json", out
    )
    assert result.code == 0
    report = json.loads(result.out.splitlines()[-1])
    keys = ("bundle", "backend", "precision", "tree", "prompts", "plain", "speculative", "speedup")
    assert set(keys) | {"identical_outputs", "environment"} <= set(report)
    assert (report["prompts"], report["dataset"], report["identical_outputs"]) == (2, "set.jsonl", 1.0)
    written = json.loads(out.read_text())
    assert len(written.pop("per_prompt")) == 2
    assert written == report


def test_bench_of_all_turns_at_a_temperature(eagle_run: Any, tiny_bundle: Path, dataset: Path) -> None:
    result = eagle_run(
        *("bench", tiny_bundle, "--dataset", dataset, "--turns", "all", "--batch", 2, "--repeat", 2),
        *("--max-new-tokens", 6, "--temperature", 1, "--seed", 3, "--tree", "chain:2"),
    )
    report = json.loads(result.out)
    assert (report["prompts"], report["identical_outputs"], report["tree"]["kind"]) == (3, 1.0, "chain")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--dataset"),
        (["--dataset", "/does/not/exist"], 1, "cannot be read"),
        (["--dataset", "SET", "--limit", "0"], 2, "--limit"),
        (["--dataset", "SET", "--json", "/does/not/exist/out.json"], 2, "no such folder"),
    ],
)
def test_bench_bad_input(  # noqa: PLR0917 - fixtures and parameters
    eagle_run: Any, tiny_bundle: Path, dataset: Path, arguments: list[str], code: int, message: str
) -> None:
    result = eagle_run("bench", tiny_bundle, *(str(dataset) if a == "SET" else a for a in arguments))
    assert (result.code, result.out) == (code, "")
    assert message in result.err
