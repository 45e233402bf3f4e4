"""benchmarks/gpu.py: its dry run with nothing but torch and Transformers, and the parts it is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import Request

from eagle_run.decoding.config import PLAIN, SpeculativeConfig
from eagle_run.decoding.rng import uniform
from eagle_run.decoding.tree import TreeShape

ROOT = Path(__file__).parents[2]
ABSENT = "onnx onnxscript onnx_ir onnxruntime pydantic click rich polygraphy psutil accelerate gguf"
HIDE = f"""
import runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {ABSENT.split()!r}
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
sys.argv = ["gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks` is a folder of the checkout and not installed."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.slow
def test_the_dry_run_needs_torch_and_transformers_only(tmp_path: Path) -> None:
    """Every section, where what a GPU machine may lack cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE, "--dry-run", "--json", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "gpu_dry_run.json").read_text()) == results
    assert results["errors"] == results["skipped"] == {}
    assert results["dry_run"] is True
    for model in ("tiny", "tinier"):
        equality = results["sections"][f"{model} equality"]
        assert equality["captured_equal"] is True
        assert equality["faults"] == 0
        for batch in (1, 2):
            check_speed(results["sections"][f"{model} batch {batch}"], batch)
    assert results["goals"]["captures_for_another_temperature"] == 0
    assert "tiny ×1 chain:2" in done.stderr


def check_speed(section: dict[str, Any], batch: int) -> None:
    assert section["batch"] == batch
    for name, depth in (("chain:2", 2), ("dynamic:3,3,8", 3)):
        tree = section["trees"][name]
        assert tree["uncaptured_equal"] is True
        assert tree["equal_to_plain"] == 1.0
        half, all_of_it = tree["runs"]
        assert 1 < half["tokens_per_round"] < all_of_it["tokens_per_round"] == depth + 1
        assert tree["verify_ms"] > 0
        assert tree["graphs_in_a_row_ms"] > 0
        assert 0 < tree["busy"] <= 1
        assert tree["least_ms"] > 0
        assert tree["round_ms"] > 0


@pytest.mark.slow
def test_from_a_checkout_it_runs_as_a_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "--dry-run" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu import main

    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "finds no CUDA GPU here; --dry-run" in capsys.readouterr().err


def model(**limits: int) -> Any:
    from benchmarks.gpu_models import random_model

    sizes = {"max_seq_len": 64, "chunk": 16, "rows": 16, **limits}
    return random_model("tiny", torch.device("cpu"), dtype=torch.float32, **sizes)


def test_a_script_is_followed_where_its_coins_say() -> None:
    """Round by round the accepted tokens are those that the positions' coins foretell."""
    from benchmarks.gpu_decode import decode

    made = model()
    made.steady()
    setup = made.setup
    runner, script = setup.runner(2, scripted=True)
    measured = setup.engine(runner)
    prompts = setup.prompts(2, 12)
    requests = [Request(prompt, max_new_tokens=24).offline for prompt in prompts]
    plain = decode(measured, requests, PLAIN)
    texts = [(*prompt, *tokens) for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
    for share in (0.0, 0.6, 1.0):
        script.write(texts, share, seed=3)
        run = decode(measured, requests, SpeculativeConfig(TreeShape.chain(3)))
        assert run.tokens == plain.tokens
        want = sum(rounds(len(p), share, slot) for slot, p in enumerate(prompts))
        assert run.metrics.rounds == want


def rounds(prompt: int, share: float, slot: int) -> int:
    """Rounds of a chain of 3 that 24 tokens take when drafts are right where the coin says."""
    at, end, count = prompt, prompt + 24, 0  # the root is at `at` - 1
    while at < end:
        right = 0
        while right < 3 and coin(slot, at + right) < share and at + right < end:
            right += 1
        at += right + 1
        count += 1
    return count


def coin(slot: int, position: int) -> float:
    return float(uniform(torch.tensor(3), torch.tensor(slot), torch.tensor(position)))


def test_a_script_leaves_other_batches_alone() -> None:
    from benchmarks.scripted_draft import Script, ScriptedDraft

    setup = model().setup
    draft = setup.graphs["draft"]
    script = Script(2, 64, setup.draft_to_target, setup.vocab, setup.device)
    logits = {}
    for name, graph in (("real", draft), ("scripted", ScriptedDraft(draft, script))):
        for batch in (1, 2):
            tensors = inputs_of(graph, batch)
            graph.bind(tensors)()
            logits[name, batch] = tensors["logits"]
    assert torch.equal(logits["real", 1], logits["scripted", 1])
    changed = logits["real", 2] != logits["scripted", 2]
    assert changed[..., 0].all()  # the empty script never proposes id 0
    assert not changed[..., 1:].any()


def inputs_of(graph: Any, batch: int) -> dict[str, torch.Tensor]:
    sizes = {"B": batch, "T": 2, "R": 2, "KV": 8}
    tensors: dict[str, torch.Tensor] = {}
    for spec in (*graph.spec.inputs, *graph.spec.outputs):
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        tensor = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        tensors[spec.name] = tensors.get(spec.name.replace("present", "past"), tensor)
    tensors["tree_mask"][..., 0] = True
    return tensors


def test_a_timeline_knows_gaps() -> None:
    from benchmarks.gpu_measure import MeasuredRounds, Timeline

    assert Timeline((2.0, 4.0), 8.0).busy == 0.75
    assert Timeline((2.0, 4.0, 9.0), 20.0).round == 4.0
    done: list[int] = []
    measured = MeasuredRounds(torch.device("cpu"))
    for i in range(3):
        measured.run("key", lambda i=i: done.append(i))  # type: ignore[misc]
    timeline = measured.take()
    assert done == [0, 1, 2]
    assert len(timeline.inside) == 3
    assert sum(timeline.inside) <= timeline.whole
    assert measured.take() == Timeline((), 0.0)  # taken


def test_random_weights_keep_activations_in_range() -> None:
    made = model()
    ids = torch.tensor([[1, 5, 9, 200, 33]])
    out = made.model(ids, output_hidden_states=True)
    assert 0.7 < float(out.logits.std()) < 1.4
    assert float(out.hidden_states[-2].std()) < 2.5
    made.steady()
    known = made.setup.draft_to_target
    best, other = made.model(known[None, 10:20]).logits.topk(2).values.unbind(-1)
    assert float((best - other).min()) > 5  # no rounding reaches that far
    assert torch.equal(made.model(known[None, 10:20]).logits.argmax(-1)[0], known[11:21])


def benchmark(tmp_path: Path, seconds: float) -> Any:
    from benchmarks.gpu import Benchmark
    from benchmarks.gpu_decode import Budget

    results: dict[str, Any] = {"sections": {}, "skipped": {}, "errors": {}}
    return Benchmark(torch.device("cpu"), Budget(seconds), tmp_path / "out.json", True, results)


def test_a_failing_section_leaves_the_others(tmp_path: Path) -> None:
    from benchmarks.gpu import Section

    def fail() -> dict[str, Any]:
        raise RuntimeError("out of luck\nand more")

    bench = benchmark(tmp_path, 100)
    for section in (
        Section("good", 1, lambda: {"a": 1}),
        Section("bad", 1, fail),
        Section("late", 101, fail),
    ):
        bench.do(section)
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["sections"] == {"good": {"a": 1}}
    assert saved["errors"] == {"bad": "RuntimeError: out of luck"}
    assert saved["skipped"]["late"].endswith("about 101 s needed")


def test_goals_are_the_worst_figures() -> None:
    from benchmarks.gpu_report import goals, table

    def tree(**changes: Any) -> dict[str, Any]:
        run = {"tokens_per_round": 3.5, "speedup": 2.25, "share": 0.8}
        return {
            "busy": 0.98,
            "round_ms": 5.0,
            "uncaptured_round_ms": 21.0,
            "plain_step_ms": 3.0,
            "round_over_graphs": 1.02,
            "uncaptured_equal": True,
            "share_of_least": 0.5,
            "runs": [run],
            **changes,
        }

    good, bad = (
        {"chain:4": tree()},
        {"chain:4": tree(busy=0.9, round_over_graphs=1.2, uncaptured_equal=False)},
    )
    sections = {
        "a batch 1": {"batch": 1, "plain": {}, "trees": {**good, "dynamic:8,10,60": {"skipped": "no time"}}},
        "b tensorrt": {
            "equality": {"faults": 2, "captured_equal": True},
            "sampling": {"settings": [], "captures_for_another_temperature": 0},
            "speed": [{"batch": 4, "plain": {}, "trees": bad}],
        },
    }
    results = {"sections": sections, "skipped": {"c": "no time"}, "errors": {"d": "TypeError: x"}}
    found = goals(results)
    assert found["busy"] == {"goal": 0.97, "worst": 0.9}
    assert found["round_over_graphs"] == {"goal": 1.05, "worst": 1.2}
    assert found["captured_equals_called"] is False
    assert found["faults_against_plain"] == 2
    assert found["captures_for_another_temperature"] == 0
    text = table(results)
    row = next(line for line in text.splitlines() if line.startswith("a ×1 chain:4"))
    assert row.split()[3:] == ["3.00", "5.00", "21.00", "98.0%", "1.020", "2.00", "2.25×", "at", "3.50"]
    for line in (
        f"{'a ×1 dynamic:8,10,60':34}no time",
        "skipped: c: no time",
        "errors: d: TypeError: x",
    ):
        assert line in text


@pytest.mark.slow
def test_a_bundle_is_measured_or_said_why_not(built_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu import main

    backends = "onnxruntime,tensorrt"
    code = main(["--dry-run", "--bundle", str(built_bundle), "--backends", backends, "--engines-only"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = results["sections"]["built onnxruntime"]
    assert found["equality"]["faults"] == 0
    assert set(found["real_head"]["trees"]) == {"dynamic:3,3,10", "chain:2", "dynamic:3,3,8"}
    assert found["real_head"]["trees"]["dynamic:3,3,10"]["tokens_per_round"] > 1
    assert [entry["batch"] for entry in found["speed"]] == [1, 4]
    if not torch.cuda.is_available():
        assert code == 1
        assert "tensorrt runs on a GPU" in results["errors"]["built tensorrt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "x"], "--batches should be numbers from 1, found x"),
        (["--batches", "1,0"], "found 1,0"),
        (["--models", "tiny,gpt5"], "found gpt5"),
        (["--backends", "abacus"], "found abacus"),
        (["--seconds", "nan"], "found nan"),
        (["--seconds", "0"], "found 0"),
        (["--engines-only"], "needs --bundle"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu import main

    with pytest.raises(SystemExit):
        main(["--dry-run", *arguments])
    assert message in capsys.readouterr().err
