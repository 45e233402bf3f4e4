"""Opening a bundle, requests, and the bookkeeping of a decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tinybundle import END, make_bundle

import eagle_run.engine.opening
from eagle_run.cli.generate import Printer
from eagle_run.decoding.sampling import SamplingParams
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.opening import Engine, open_engine
from eagle_run.engine.request import Piece
from eagle_run.errors import EagleError, UsageError


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Engine:
    return open_engine(tiny_bundle, threads=1)


def test_opens_with_the_bundles_own_tree(engine: Engine) -> None:
    assert engine.tree == TreeShape.dynamic(3, 3, 8)
    assert (engine.backend, engine.batch, engine.precision) == ("onnxruntime", 1, "fp32")


def test_without_draft_there_is_no_tree(tiny_bundle: Path) -> None:
    engine = open_engine(tiny_bundle, threads=1, with_draft=False)
    assert engine.tree is None
    assert not engine.decoder.runner.has_draft
    with pytest.raises(UsageError, match="no draft head"):
        engine.decode([engine.request("hello")], TreeShape.chain(2))


def test_requests_use_the_template_and_the_stop_tokens(engine: Engine) -> None:
    text = "user: hi\nassistant:"
    assert engine.request("hi").prompt == tuple(engine.text.encode(text))
    assert engine.request("hi").stop_tokens == {END}
    assert engine.request("hi", ignore_eos=True).stop_tokens == frozenset()
    assert engine.request("hi", raw=True).prompt == tuple(engine.text.encode("hi"))


def test_messages_and_system(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with_system = engine.request(messages, system="be brief")
    assert with_system.prompt == engine.request("hi", system="be brief").prompt
    assert with_system.prompt == tuple(engine.text.encode("system: be brief\nuser: hi\nassistant:"))
    with pytest.raises(UsageError, match="chat template"):
        engine.request(messages, raw=True)


def test_decode_joins_pieces_and_times_every_round(engine: Engine) -> None:
    pieces: list[Piece] = []
    request = engine.request("hello there", max_new_tokens=30)
    decoded = engine.decode([request], TreeShape.dynamic(3, 3, 8), on_piece=pieces.append)
    answer = decoded.answers[0]
    assert answer.tokens == [token for piece in pieces for token in piece.tokens]
    assert answer.text == "".join(piece.text for piece in pieces)
    assert answer.finish_reason == pieces[-1].finish_reason == "length"
    assert len(decoded.rounds) == decoded.stats.steps == len(pieces)
    total = sum(time.draft + time.verify + time.glue for time in decoded.rounds)
    assert total == pytest.approx(decoded.stats.decode_seconds)


def test_a_batch_gives_each_prompt_what_it_gives_alone(tiny_bundle: Path, engine: Engine) -> None:
    together = open_engine(tiny_bundle, threads=1, batch=3)
    texts = ("a", "a much longer prompt than the others", "third one", "the last, in a group of its own")
    sampling = SamplingParams(temperature=0.9, seed=5)
    shape = TreeShape.dynamic(2, 3, 6)
    requests = [engine.request(text, sampling=sampling, max_new_tokens=20) for text in texts]
    decoded = together.decode(requests, shape)
    assert decoded.tokens == [engine.decode([request], shape).tokens[0] for request in requests]
    assert len(decoded.rounds) == decoded.stats.steps


def test_decoded_survives_an_interrupt(engine: Engine) -> None:
    from eagle_run.engine.opening import Decoded
    from eagle_run.engine.request import Stats

    def stop(piece: Piece) -> None:
        if len(decoded.rounds) == 3:
            raise KeyboardInterrupt

    decoded = Decoded([], Stats(), [])
    with pytest.raises(KeyboardInterrupt):
        engine.decode([engine.request("hello")], TreeShape.plain(), on_piece=stop, decoded=decoded)
    assert len(decoded.answers[0].tokens) == 3
    assert decoded.answers[0].finish_reason is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_engines_need_a_gpu(tiny_bundle: Path, backend: str) -> None:
    with pytest.raises(EagleError, match="needs an NVIDIA GPU") as caught:
        open_engine(tiny_bundle, backend=backend)
    assert "--device cpu" in caught.value.hint


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
        open_engine(tiny_bundle, **options)  # type: ignore[arg-type]


def test_an_edited_graph_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    graph = copy / "onnx/target.onnx"
    data = bytearray(graph.read_bytes())
    data[-1] ^= 1
    graph.write_bytes(data)
    with pytest.raises(EagleError, match="edited or corrupt"):
        open_engine(copy)


def test_a_bundle_without_head_decodes_plainly(tmp_path: Path) -> None:
    engine = open_engine(make_bundle(tmp_path / "bare", head=False), threads=1)
    assert engine.tree is None
    decoded = engine.decode([engine.request("hello", max_new_tokens=5)], TreeShape.plain())
    assert len(decoded.answers[0].tokens) == 5


def test_decoding_leaves_torchs_threads_as_they_were(engine: Engine) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(2)
        request = engine.request("hello", max_new_tokens=2)
        engine.decode([request], TreeShape.plain(), on_piece=lambda _: seen.append(torch.get_num_threads()))
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_shows_what_had_begun(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(0, 4, several=True)
    printer(Piece(0, (1,), "one", "stop"))
    printer(Piece(2, (3,), "thr", None))
    printer.close()
    assert capsys.readouterr().out == "[0] one\n[1] \n[2] thr\n"


def test_a_bundle_that_is_replaced_while_it_is_opened_is_refused(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of the old one and a tokenizer of the new one would decode without a word."""
    bundle, load = shutil.copytree(tiny_bundle, tmp_path / "b"), eagle_run.engine.opening.open_graphs

    def replaced(*arguments: Any, **options: Any) -> Any:
        opened = load(*arguments, **options)
        manifest = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(
            json.dumps({**manifest, "created": "2030-01-01T00:00:00+00:00"})
        )
        return opened

    monkeypatch.setattr(eagle_run.engine.opening, "open_graphs", replaced)
    with pytest.raises(EagleError, match="was replaced while it was read"):
        open_engine(bundle)
    monkeypatch.undo()
    open_engine(bundle)
