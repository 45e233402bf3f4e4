"""Limits of a bundle: what decoding takes at them, and those that cannot work or barely do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny import build_bundle

import eagle_export.pipeline.estimate
from eagle_export.cli.main import run
from eagle_export.pipeline.decoding_memory import DecodingMemory
from eagle_export.pipeline.estimate import Memory
from eagle_export.pipeline.options import BuildOptions, EngineOptions
from eagle_export.pipeline.plan import Plan, estimate_plan, fit, make_plan
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.engine.loading import load_engine
from eagle_run.engine.offline import OfflineRequest, run_offline
from eagle_run.errors import EagleError, UsageError
from eagle_run.params import SamplingParams

LIMITS: dict[str, Any] = {"max_seq_len": 128, "prefill_chunk": 16, "max_tree_nodes": 32, "max_batch": 4}
TREE: dict[str, Any] = {"tree": "dynamic", "depth": 6, "top_k": 8, "nodes": 32}


def planned(target: Path, head: Path | str, out: Path, **options: Any) -> Plan:
    return make_plan(BuildOptions(target=str(target), head=str(head), out=out, **{**LIMITS, **options}))


def decoding_of(plan: Plan) -> DecodingMemory:
    found = estimate_plan(plan).decoding
    assert found is not None
    return found


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how much memory this machine has: available, and in all."""

    def give(available: float, total: float) -> None:
        here = Memory(int(available), int(total))
        monkeypatch.setattr(eagle_export.pipeline.estimate, "memory_here", lambda: here)

    return give


@pytest.mark.parametrize(("batch", "precision"), [(1, "fp32"), (4, "fp16")])
def test_the_figure_is_that_of_a_run_at_the_limits(
    batch: int, precision: str, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    options = {"max_batch": batch, "precision": precision, "measure": False, **TREE}
    bundle = build_bundle(tiny_target, tiny_head, tmp_path / "bundle", **options)
    engine = load_engine(bundle, batch=batch, threads=1)
    assert engine.tokenizer is not None
    assert engine.default_tree is not None
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    request = OfflineRequest(tuple(engine.tokenizer.encode_prompt("hello " * 4)), params)
    run_offline(engine, [request] * batch, SpeculativeConfig(engine.default_tree))
    runner = engine.runner
    tensors = [*runner._caches.values(), *runner._staging.values(), *runner._buffers.values()]
    expected = decoding_of(planned(tiny_target, tiny_head, tmp_path / "b", **options)).of(batch)
    assert 0.85 * expected < sum(tensor.nbytes for tensor in tensors) < 1.15 * expected


def test_a_plan_says_what_decoding_will_take(
    tiny_target: Path, tiny_head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--target", str(tiny_target), "--head", str(tiny_head)]
    options = [word for name, value in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["build", *paths, *options, "--depth", "2", "--branch", "2", "--nodes", "4", "--plan"]
    assert run(command) == 0
    assert "at most 4 side by side" in capsys.readouterr().out
    assert run([*command, "--json", "--max-batch", "100000"]) == 0
    found = json.loads(capsys.readouterr().out)["decoding"]
    assert found["max_batch"] == 100_000
    assert found["memory_bytes"] >= 100_000 * found["sequence_bytes"] > 10**9


def test_a_batch_that_cannot_fit_is_refused_with_figures(
    tiny_target: Path, tmp_path: Path, memory: Any
) -> None:
    memory(16e9, 16e9)
    plan = planned(tiny_target, "none", tmp_path / "b", max_batch=1_000_000)
    needed = decoding_of(plan)
    with pytest.raises(EagleError, match=r"decoding 1,000,000 sequences of 128 tokens takes about") as caught:
        fit(plan)
    assert f"{needed.of(1_000_000) / 1e9:.0f} GB of memory" in caught.value.message
    assert "there are 16 GB in all" in caught.value.message
    fits = needed.largest_batch(16 * 10**9)
    assert needed.of(fits) <= 16e9 < needed.of(fits + 1)
    assert f"{fits:,} sequences of this length fit" in caught.value.hint
    assert set(caught.value.parameters) == set(LIMITS)
    assert not (tmp_path / "b.partial").exists()


def test_one_sequence_that_cannot_fit_says_so(tiny_target: Path, tmp_path: Path, memory: Any) -> None:
    plan = planned(tiny_target, "none", tmp_path / "b", max_batch=1)
    one = decoding_of(plan).of(1)
    memory(one / 3, one / 3)
    with pytest.raises(EagleError, match="decoding 1 sequence of 128 tokens") as caught:
        fit(plan)
    assert "not even one" in caught.value.hint


def warnings_of(plan: Plan) -> str:
    return "\n".join(note for note in fit(plan)[2] if "decoding" in note or "tokens" in note)


def test_what_may_not_fit_is_warned_of(tiny_target: Path, tmp_path: Path, memory: Any) -> None:
    plan = planned(tiny_target, "none", tmp_path / "b", max_batch=100_000)
    whole = decoding_of(plan).of(100_000)
    memory(whole + 1, whole + 1)
    assert warnings_of(plan) == ""
    memory(whole - 1, whole + 1)
    assert "are available: not all of them may fit" in warnings_of(plan)
    memory(whole / 2, whole / 2)
    assert "may fit" in warnings_of(plan)


def test_the_recipes_own_limits_are_only_warned_of(tiny_target: Path, tmp_path: Path, memory: Any) -> None:
    """A bundle of a large model may be made on a small machine, to be run elsewhere."""
    plan = make_plan(BuildOptions(target=str(tiny_target), head="none", out=tmp_path / "b"))
    assert not plan.asked
    monstrous = replace(plan, limits=plan.limits.model_copy(update={"max_batch": 10**7}))
    memory(16e9, 16e9)
    assert "may fit" in warnings_of(monstrous)
    with pytest.raises(EagleError, match="16 GB in all"):
        fit(replace(monstrous, asked=("max_batch",)))


def test_engines_run_elsewhere(tiny_target: Path, tmp_path: Path, memory: Any) -> None:
    memory(16e9, 16e9)
    engine = EngineOptions(backend="tensorrt-rtx")
    plan = planned(tiny_target, "none", tmp_path / "b", precision="fp16", engine=engine, max_batch=500_000)
    assert warnings_of(plan) == ""
    plan = planned(tiny_target, "none", tmp_path / "b", precision="fp16", engine=engine, max_batch=10**7)
    assert "more than a GPU has" in warnings_of(plan)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_seq_len": 2, "prefill_chunk": 2}, "have 2 tokens together"),
        ({"prefill_chunk": 1}, "1 tokens at a time"),
        ({"max_seq_len": 32, "prefill_chunk": 8}, ""),
    ],
)
def test_what_barely_works_is_warned_of(
    limits: dict[str, int], words: str, tiny_target: Path, tmp_path: Path
) -> None:
    said = warnings_of(planned(tiny_target, "none", tmp_path / "b", **limits))
    assert (words in said) if words else said == ""


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("max_seq_len", 1, 2), ("max_batch", 0, 1), ("prefill_chunk", 0, 1), ("max_tree_nodes", -1, 1)],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: int, least: int) -> None:
    """One token is read and one is answered, at the least."""
    with pytest.raises(UsageError, match=f"{name} should be at least {least}, found {value}") as caught:
        BuildOptions(target="any", **{name: value}).check()
    assert caught.value.parameters == (name,)
    BuildOptions(target="any", **{name: least}).check()
