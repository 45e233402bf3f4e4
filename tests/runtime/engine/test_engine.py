"""Opening a bundle, requests, and the bookkeeping of a decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import request_of, run
from support.tinybundle import make_bundle

import eagle_run.engine.engine
import eagle_run.engine.loading
from eagle_run.cli.generate import Answer, Printer
from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.engine.offline import run_offline
from eagle_run.errors import EagleError, UsageError
from eagle_run.outputs import RequestOutput
from eagle_run.params import SamplingParams


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Engine:
    return load_engine(tiny_bundle, threads=1)


def test_opens_with_the_bundles_own_tree(engine: Engine) -> None:
    assert engine.default_tree == TreeShape.dynamic(3, 3, 8)
    assert (engine.backend, engine.runner.batch, engine.runner.precision) == ("onnxruntime", 1, "fp32")


def test_without_draft_there_is_no_tree(tiny_bundle: Path) -> None:
    engine = load_engine(tiny_bundle, threads=1, with_draft=False)
    assert engine.default_tree is None
    assert not engine.runner.has_draft
    with pytest.raises(UsageError, match="no draft head"):
        run(engine, [request_of(engine, "hello")], TreeShape.chain(2))


def test_every_round_is_timed(engine: Engine) -> None:
    seen: list[RequestOutput] = []
    request = request_of(engine, "hello there", max_new_tokens=30)
    speculative = SpeculativeConfig(TreeShape.dynamic(3, 3, 8))
    done = run_offline(
        engine, [request.offline], speculative, on_output=lambda _, output: seen.append(output)
    )
    assert done.outputs[0] == seen[-1]
    assert [len(output.outputs[0].token_ids) for output in seen][-1] == 30
    assert seen[-1].outputs[0].finish_reason == "length"
    assert len(done.round_times) == done.metrics.steps == len(seen)
    total = sum(time.draft + time.verify + time.glue for time in done.round_times)
    assert total == pytest.approx(done.metrics.decode_seconds)


def test_a_batch_gives_each_prompt_what_it_gives_alone(tiny_bundle: Path, engine: Engine) -> None:
    together = load_engine(tiny_bundle, threads=1, batch=3)
    texts = ("a", "a much longer prompt than the others", "third one", "the last, in a group of its own")
    sampling = SamplingParams(temperature=0.9, seed=5)
    shape = TreeShape.dynamic(2, 3, 6)
    requests = [request_of(engine, text, sampling=sampling, max_new_tokens=20) for text in texts]
    done = run(together, requests, shape)
    assert done.token_ids == [run(engine, [request], shape).token_ids[0] for request in requests]
    assert len(done.round_times) == done.metrics.steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_engines_need_a_gpu(tiny_bundle: Path, backend: str) -> None:
    with pytest.raises(EagleError, match="needs an NVIDIA GPU") as caught:
        load_engine(tiny_bundle, backend=backend)
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "abacus"}, "abacus"),
        ({"batch": 0}, "1 to 4"),
        ({"batch": 5}, "1 to 4"),
        ({"threads": -1}, "-1"),
    ],
)
def test_options_that_make_no_sense(tiny_bundle: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_engine(tiny_bundle, **options)  # type: ignore[arg-type]


def test_an_edited_graph_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    graph = copy / "onnx/target.onnx"
    data = bytearray(graph.read_bytes())
    data[-1] ^= 1
    graph.write_bytes(data)
    with pytest.raises(EagleError, match="edited or corrupt"):
        load_engine(copy)


def test_a_bundle_without_head_decodes_plainly(tmp_path: Path) -> None:
    engine = load_engine(make_bundle(tmp_path / "bare", head=False), threads=1)
    assert engine.default_tree is None
    done = run(engine, [request_of(engine, "hello", max_new_tokens=5)], TreeShape.plain())
    assert len(done.token_ids[0]) == 5


def test_decoding_leaves_torchs_threads_as_they_were(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    inside: list[int] = []
    true = eagle_run.engine.engine.run_round

    def spy(*arguments: Any, **options: Any) -> Any:
        inside.append(torch.get_num_threads())
        return true(*arguments, **options)

    monkeypatch.setattr(eagle_run.engine.engine, "run_round", spy)
    try:
        torch.set_num_threads(2)
        run(engine, [request_of(engine, "hello", max_new_tokens=2)], TreeShape.plain())
        assert (inside, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_shows_what_had_begun(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answer("one", [1], "stop"), Answer(), Answer("thr", [3]), Answer()]
    printer = Printer(answers, 0, several=True)
    printer("")
    printer.close()
    assert capsys.readouterr().out == "[0] one\n[1] \n[2] thr\n"


def test_a_bundle_that_is_replaced_while_it_is_opened_is_refused(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of the old one and a tokenizer of the new one would decode without a word."""
    bundle, load = shutil.copytree(tiny_bundle, tmp_path / "b"), eagle_run.engine.loading.load_graphs

    def replaced(*arguments: Any, **options: Any) -> Any:
        opened = load(*arguments, **options)
        manifest = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(
            json.dumps({**manifest, "created": "2030-01-01T00:00:00+00:00"})
        )
        return opened

    monkeypatch.setattr(eagle_run.engine.loading, "load_graphs", replaced)
    with pytest.raises(EagleError, match="was replaced while it was read"):
        load_engine(bundle)
    monkeypatch.undo()
    load_engine(bundle)
