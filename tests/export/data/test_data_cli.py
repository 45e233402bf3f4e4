"""eagle-export data as a user meets it: what it writes, how it goes on when interrupted, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.datamaker import Cli, load_shards, shard_bytes

import eagle_export.data.run as data_run
from eagle_export.checkpoints import weights
from eagle_export.files import alone_in
from eagle_run.bundle.loading import load_bundle

SMALL = ("--max-seq-len", 96, "--max-prompt-tokens", 64, "--max-new-tokens", 12, "--batch", 4, "--top-k", 0)
SHARDS = ("--shard-size", 4, "--self-play", 14, "--precision", "fp32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine lines: seven prompts of four shapes, one of which comes three times."""
    lines: list[Any] = [
        {"messages": [{"role": "user", "content": f"Tell me about number {word} and why"}]}
        for word in ("one", "two", "three")
    ]
    lines += [{"prompt": "Hello there"}, "hello  THERE", {"turns": ["Hello there!"]}, "Sing a song"]
    lines += [{"turns": ["Name a tree", "Another"]}]
    lines += [{"conversations": [{"from": "human", "value": "A question of a benchmark in many words"}]}]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def whole_run(talking_target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of one uninterrupted run. Do not write into it."""
    from eagle_export.cli.main import run

    out = tmp_path_factory.mktemp("whole") / "data"
    assert run([str(part) for part in command(talking_target, prompts, out)]) == 0
    return out


def command(target: Path, prompts: Path, out: Path) -> list[object]:
    return ["data", target, "--prompts", prompts, *SMALL, *SHARDS, "--out", out]


def test_help_explains(cli: Cli) -> None:
    outcome = cli("data", "--help")
    assert outcome.code == 0
    for word in ("--self-play", "--prompts", "--exclude", "--temperature", "--json", "--debug"):
        assert word in outcome.out
    assert "data" in cli("--help").out


def test_shards_and_data_json_fit_together(whole_run: Path, talking_target: Path) -> None:
    data = json.loads((whole_run / "data.json").read_text())
    shards = load_shards(whole_run)
    assert data["complete"]
    assert (
        [shard["file"] for shard in data["shards"]]
        == list(shards)
        == [f"{i:05}.safetensors" for i in range(6)]
    )
    assert data["target"]["sha256"] == weights.folder_identity(talking_target)
    assert (data["target"]["vocab_size"], data["target"]["source"]) == (80, talking_target.name)
    assert data["settings"]["top_k"] == 0
    total = {"conversations": 0, "tokens": 0, "answer_tokens": 0}
    for shard in shards.values():
        count = len(shard["prompt_lengths"])
        assert [shard[name].dtype for name in ("tokens", "offsets", "prompt_lengths")] == [
            torch.int32,
            torch.int64,
            torch.int32,
        ]
        assert [shard[name].dtype for name in ("temperature", "loss_mask")] == [torch.float32, torch.uint8]
        assert shard["offsets"].shape == (count + 1,)
        assert int(shard["offsets"][0]) == 0
        assert int(shard["offsets"][-1]) == len(shard["tokens"]) == len(shard["loss_mask"])
        for i in range(count):
            mask = shard["loss_mask"][shard["offsets"][i] : shard["offsets"][i + 1]].tolist()
            assert mask.index(1) == shard["prompt_lengths"][i]
            assert mask[-1] == 1
        total["conversations"] += count
        total["tokens"] += len(shard["tokens"])
        total["answer_tokens"] += int(shard["loss_mask"].sum())
    assert {name: data["counts"][name] for name in total} == total
    dropped = data["counts"]["dropped"]
    assert dropped["duplicate"] >= 2
    assert total["conversations"] + sum(dropped.values()) == 9 + 14
    assert sorted(path.name for path in whole_run.iterdir()) == sorted(["data.json", *shards])


def interrupted_after(shards: int) -> Any:
    """write_shard that is hit by Ctrl-C in the middle of a later shard."""
    real, left = data_run.write_shard, iter([True] * shards)

    def write(path: Path, *rest: Any) -> Any:
        if not next(left, False):
            path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
            raise KeyboardInterrupt
        return real(path, *rest)

    return write


@pytest.mark.parametrize("finished", [0, 1, 4])
def test_a_run_that_was_interrupted_goes_on(
    finished: int,
    *,
    cli: Cli,
    whole_run: Path,
    talking_target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr(data_run, "write_shard", interrupted_after(finished))
        outcome = cli(*command(talking_target, prompts, out))
    assert outcome.code == 130
    assert outcome.out == ""
    assert "same command" in outcome.err
    assert "nothing was kept" not in outcome.err
    assert len(load_shards(out)) == finished
    data = json.loads((out / "data.json").read_text())
    assert not data["complete"]
    assert data["counts"]["shards"] == finished
    assert cli(*command(talking_target, prompts, out)).code == 0
    assert shard_bytes(out) == shard_bytes(whole_run)
    assert (out / "data.json").read_bytes() == (whole_run / "data.json").read_bytes()


def test_what_is_there_is_not_made_again(
    cli: Cli, whole_run: Path, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole_run, tmp_path / "data")
    data = json.loads((out / "data.json").read_text())
    data["target"]["source"] = "/where/it/once/was"
    (out / "data.json").write_text(json.dumps(data))
    damaged = out / "00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    outcome = cli(*command(talking_target, prompts, out))
    assert "5 of 6 shards are there already" in outcome.err
    assert shard_bytes(out) == shard_bytes(whole_run)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert {name for name in times if times[name] != after[name]} == {damaged.name}


def test_more_self_play_has_the_shards_of_less(
    cli: Cli, whole_run: Path, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    less = [6 if part == 14 else part for part in command(talking_target, prompts, out)]
    assert cli(*less).code == 0
    assert 0 < len(load_shards(out)) < 6
    assert cli(*command(talking_target, prompts, out)).code == 0
    assert shard_bytes(out) == shard_bytes(whole_run)


def test_benchmark_prompts_are_excluded(
    cli: Cli, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    benchmark = tmp_path / "benchmark.jsonl"
    benchmark.write_text('{"question_id": 1, "turns": ["a question of a benchmark in many words"]}\n')
    arguments = ["data", talking_target, "--prompts", prompts, *SMALL, "--exclude", benchmark]
    outcome = cli(*arguments, "--near", 1, "--json", "--out", tmp_path / "data")
    assert outcome.code == 0, outcome.err
    counts = json.loads(outcome.out)["counts"]
    assert counts["dropped"]["excluded"] == 1
    assert counts["dropped"]["duplicate"] == 2
    assert "tokens/s" in outcome.err


def test_a_bundle_answers_too(cli: Cli, tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """Its batch may pass what it was built for: the ONNX graph takes any."""
    arguments = ["data", tiny_bundle, "--prompts", prompts, *SMALL, "--batch", 6, "--loops", "keep"]
    outcome = cli(*arguments, "--json", "--out", tmp_path / "data")
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    assert data["target"]["sha256"] == load_bundle(tiny_bundle).manifest.target.sha256
    assert data["made_with"]["backend"] == "onnxruntime fp32 on cpu"
    assert data["counts"]["conversations"] >= 6
    with safe_open(tmp_path / "data" / "00000.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["shard"])["part"] == "prompts 0-7"


def fails(outcome: Any, code: int, *words: str) -> None:
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    for word in ("error: ", *words):
        assert word.lower() in outcome.err.lower(), outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ["--self-play", "hint"]),
        (("--self-play", 4, "--max-prompt-tokens", 96), 2, ["--max-prompt-tokens", "no room"]),
        (("--self-play", 4, "--temperature", "hot"), 2, ["--temperature", "'hot'"]),
        (("--self-play", 4, "--near", 0), 2, ["--near"]),
        (
            ("--self-play", 4, "--prompt-temperature", 1e-9),
            2,
            ["prompt_temperature is 1e-09", "(--prompt-temperature)"],
        ),
        (("--self-play", 0), 2, ["--self-play"]),
        (("--prompts", "no-such.jsonl"), 1, ["no-such.jsonl", "cannot be read"]),
        (("--self-play", 4, "--exclude", "no-such.jsonl"), 1, ["no-such.jsonl"]),
        (("--self-play", 4, "--max-seq-len", 999), 1, ["256 positions"]),
    ],
)
def test_what_cannot_be_leaves_nothing(
    arguments: tuple[object, ...],
    code: int,
    words: list[str],
    *,
    cli: Cli,
    talking_target: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "data"
    fails(cli("data", talking_target, *SMALL, "--out", out, *arguments), code, *words)
    assert not out.exists()


def test_a_folder_of_something_else_is_left_alone(
    cli: Cli, whole_run: Path, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = command(talking_target, prompts, tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    fails(cli(*arguments), 1, "left alone", "--out")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]

    before = shard_bytes(whole_run)
    other = command(talking_target, prompts, whole_run)
    fails(cli(*other, "--seed", 1), 1, "another setting: seed was 0, now it is 1")
    assert shard_bytes(whole_run) == before


def test_a_shorter_run_would_leave_shards_behind(
    cli: Cli, whole_run: Path, talking_target: Path, prompts: Path
) -> None:
    before = shard_bytes(whole_run)
    shorter = command(talking_target, prompts, whole_run)
    fails(
        cli(*shorter, "--self-play", 9),
        1,
        "made with 14 prompts of the target",
        "14 or more",
        "(--self-play, --out)",
    )
    assert shard_bytes(whole_run) == before


def test_two_runs_do_not_share_a_folder(
    cli: Cli, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    with alone_in(out):
        fails(cli(*command(talking_target, prompts, out)), 1, "another run is writing")
    assert not out.exists()


def test_another_target_does_not_go_on(
    cli: Cli, whole_run: Path, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(talking_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    out = shutil.copytree(whole_run, tmp_path / "data")
    fails(cli(*command(target, prompts, out)), 1, "another target")
    assert shard_bytes(out) == shard_bytes(whole_run)


def test_a_target_without_a_chat_template(
    cli: Cli, talking_target: Path, prompts: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(talking_target, tmp_path / "target")
    where = target / "tokenizer_config.json"
    config = json.loads(where.read_text())
    del config["chat_template"]
    where.write_text(json.dumps(config))
    fails(cli(*command(target, prompts, tmp_path / "data")), 1, "no chat template", "hint")
    assert not (tmp_path / "data").exists()


def test_a_full_disk_keeps_what_is_finished(
    cli: Cli, talking_target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = data_run.write_shard

    def full(path: Path, *rest: Any) -> Any:
        if path.name.startswith("00001"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest)

    monkeypatch.setattr(data_run, "write_shard", full)
    out = tmp_path / "data"
    fails(cli(*command(talking_target, prompts, out)), 1, "No space left", "free some space")
    assert sorted(path.name for path in out.iterdir()) == ["00000.safetensors", "data.json"]
