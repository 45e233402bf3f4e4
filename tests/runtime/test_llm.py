"""LLM: prompts of every form, n, logprobs, streams, threads, and requests that fail alone."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tinybundle import END, MAX_SEQ_LEN, make_bundle

from eagle_run import (
    LLM,
    EagleError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SpeculativeConfig,
    TreeShape,
)
from eagle_run.bench.mismatch import next_logits
from eagle_run.errors import UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24)
PROMPTS = ["hello", "a second one", "and the third, which is longer"]
TREES = ["plain", "chain:3", "dynamic:3,3,8"]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle, threads=1)


@pytest.fixture(scope="module")
def batched(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle, threads=1, batch=3)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_come_as_text_as_ids_and_as_mappings(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    (expected,) = llm.generate("hello", GREEDY)
    assert expected.prompt == "hello"
    assert expected.prompt_token_ids == tuple(ids)
    assert expected.finished
    assert expected.outputs[0].finish_reason == "length"
    assert len(expected.outputs[0].token_ids) == 24
    for prompt in (["hello"], ids, [ids], {"prompt": "hello"}, [{"prompt_token_ids": ids}]):
        assert tokens(llm.generate(prompt, GREEDY)) == [expected.outputs[0].token_ids]  # type: ignore[arg-type]


def test_chat_is_the_template_around_the_same(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt_token_ids == tuple(llm.tokenizer.encode("user: hello\nassistant:"))
    assert tokens(llm.chat([messages, messages], GREEDY)) == [answer.outputs[0].token_ids] * 2
    assert "".join(delta.outputs[0].text for delta in llm.stream(messages, GREEDY)) == answer.outputs[0].text


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batches_trees_and_streams_give_the_same_answers(
    tiny_bundle: Path, batched: LLM, tree: str, params: SamplingParams
) -> None:
    alone = LLM(tiny_bundle, threads=1, tree="plain")
    expected = [alone.generate(prompt, params)[0] for prompt in PROMPTS]
    with LLM(tiny_bundle, threads=1, batch=2, tree=tree) as llm:
        assert tokens(llm.generate(PROMPTS, params)) == tokens(expected)
        texts = dict.fromkeys("012", "")
        for delta in llm.stream(PROMPTS, params, request_ids=list("012")):
            texts[delta.request_id] += delta.outputs[0].text
        assert list(texts.values()) == [output.outputs[0].text for output in expected]


def test_output_kinds_hold_everything_or_what_is_new(llm: LLM) -> None:
    engine = llm.engine
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    seen: dict[RequestOutputKind, list[Any]] = {}
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=24, output_kind=kind, logprobs=0)
        engine.add_request("it", "hello", params)
        seen[kind] = []
        while engine.has_unfinished_requests():
            seen[kind] += [output.outputs[0] for output in engine.step()]
    (final,) = seen[RequestOutputKind.FINAL_ONLY]
    cumulative, deltas = seen[RequestOutputKind.CUMULATIVE], seen[RequestOutputKind.DELTA]
    assert final.token_ids == cumulative[-1].token_ids == whole.token_ids
    assert final.text == cumulative[-1].text == "".join(delta.text for delta in deltas)
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
    assert sum(len(delta.logprobs) for delta in deltas) == 24
    assert all(a.token_ids == b.token_ids[: len(a.token_ids)] for a, b in pairwise(cumulative))


@pytest.mark.parametrize("tree", TREES)
def test_n_answers_are_those_of_the_seeds(tiny_bundle: Path, llm: LLM, tree: str) -> None:
    with LLM(tiny_bundle, threads=1, batch=2, tree=tree) as several:
        params = SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=16)
        (output,) = several.generate("hello", params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for index, completion in enumerate(output.outputs):
        one = SamplingParams(temperature=0.9, seed=7 + index, max_tokens=16)
        assert completion.token_ids == llm.generate("hello", one)[0].outputs[0].token_ids
    assert output.metrics.tokens == 48
    assert output.metrics.prompt_tokens == 5
    with pytest.raises(UsageError, match="n should be 1"):
        SamplingParams(temperature=0, n=2)


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=24)
    assert len(set(tokens(llm.generate(["hello"] * 4, params)))) > 1


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_targets_own_logits(
    tiny_bundle: Path, tree: str, params: SamplingParams
) -> None:
    """Of every token, by a forward over all that precedes it: raw, before temperature and top-p."""
    with LLM(tiny_bundle, threads=1, tree=tree, batch=2) as llm:
        asked = SamplingParams(**{**vars(params), "logprobs": 3})
        plain = SamplingParams(**{**vars(params), "logprobs": None})
        first, second = llm.generate(["hello", "hello"], [asked, plain])
        completion = first.outputs[0]
        assert second.outputs[0].logprobs is None
        assert second.outputs[0].token_ids == completion.token_ids
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        total = 0.0
        for place, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            prefix = [*first.prompt_token_ids, *completion.token_ids[:place]]
            logp = next_logits(llm.engine.runner, prefix, chunk=16).double().log_softmax(-1)
            assert entries[token].logprob == pytest.approx(float(logp[token]), abs=1e-4)
            assert entries[token].rank == 1 + int((logp > logp[token] + 1e-9).sum())
            top = torch.topk(logp, 3)
            assert {int(i) for i in top.indices} <= set(entries)
            assert len(entries) == 3 + (token not in top.indices.tolist())
            assert entries[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)
            total += entries[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total)


def test_stop_reasons_are_told(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY)[0].outputs[0].text
    ids = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    stop = text[5:8]
    (cut,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=24, stop=["never", stop]))
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.outputs[0].text == text[: text.index(stop)]
    keeps = SamplingParams(temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("hello", keeps)[0].outputs[0].text == text[: text.index(stop) + len(stop)]
    (token,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[ids[4]]))
    assert (token.outputs[0].finish_reason, token.outputs[0].stop_reason) == ("stop", ids[4])
    assert token.outputs[0].token_ids == ids[: ids.index(ids[4]) + 1]


def test_the_models_own_end_token_stops_unless_it_is_ignored(llm: LLM) -> None:
    assert llm.engine.stop_token_ids == {END}
    params = SamplingParams(temperature=1.2, seed=1, max_tokens=None)
    ended = [output.outputs[0] for output in llm.generate(["hello"] * 1, params)]
    ignoring = SamplingParams(temperature=1.2, seed=1, max_tokens=None, ignore_eos=True)
    (whole,) = llm.generate("hello", ignoring)
    assert len(whole.outputs[0].token_ids) == MAX_SEQ_LEN - 5
    assert whole.outputs[0].finish_reason == "length"
    assert ended[0].token_ids == whole.outputs[0].token_ids[: len(ended[0].token_ids)]
    if ended[0].finish_reason == "stop":
        assert (ended[0].token_ids[-1], ended[0].stop_reason) == (END, None)


def test_a_bad_prompt_is_named_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(EagleError, match=f"prompt 1: the prompt has {MAX_SEQ_LEN + 8} tokens"):
        llm.generate(["hello", "x" * (MAX_SEQ_LEN + 8)], GREEDY)
    with pytest.raises(EagleError, match="token ids outside"):
        llm.generate([[1, 2, 10**6]], GREEDY)
    with pytest.raises(UsageError, match="2 prompts, but 1 sampling params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(UsageError, match="cannot be read"):
        llm.generate({"text": "a"}, GREEDY)
    assert llm.engine.is_idle
    assert not llm._outputs
    assert tokens(llm.generate("hello", GREEDY)) == tokens(llm.generate("hello", GREEDY))


def test_a_request_that_fails_fails_alone(batched: LLM) -> None:
    """Its stopping criterion raises in the middle; the others are not touched."""
    expected = tokens(batched.generate(PROMPTS, GREEDY))
    made: list[int] = []

    def criterion() -> Any:
        made.append(len(made))
        number = made[-1]

        def ends(_: int) -> bool:
            if number == 1:
                raise ValueError("no more")
            return False

        return ends

    texts: dict[str, RequestOutput] = {}
    answers = dict.fromkeys("012", ())
    stream = batched.stream(PROMPTS, GREEDY, request_ids=list("012"), stopping_criterion=criterion)
    for delta in stream:
        answers[delta.request_id] += delta.outputs[0].token_ids
        texts[delta.request_id] = delta
    assert texts["1"].outputs[0].finish_reason == "abort"
    assert "ValueError: no more" in str(texts["1"].error)
    assert [answers["0"], answers["2"]] == [expected[0], expected[2]]
    assert tokens(batched.generate(PROMPTS, GREEDY)) == expected


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=100))
    next(stream)
    assert llm.engine.has_unfinished_requests()
    stream.close()
    assert llm.engine.is_idle
    llm.stream("hello", SamplingParams(temperature=0, max_tokens=100))  # dropped, and never asked
    gc.collect()
    assert llm.engine.is_idle
    assert not llm._outputs
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 24


def test_streams_in_turns_share_the_batch(batched: LLM) -> None:
    """Two iterators of one thread, read in turns: each gets its own outputs."""
    expected = [output.outputs[0].text for output in batched.generate(PROMPTS[:2], GREEDY)]
    streams = [batched.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    texts, open_streams = ["", ""], {0, 1}
    while open_streams:
        for number in sorted(open_streams):
            delta = next(streams[number], None)
            if delta is None:
                open_streams.discard(number)
            else:
                texts[number] += delta.outputs[0].text
    assert texts == expected


def test_threads_share_the_batch_and_get_their_own_answers(batched: LLM) -> None:
    expected = {prompt: batched.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS}
    wrong: list[object] = []

    def ask(prompt: str) -> None:
        for _ in range(4):
            (output,) = batched.generate(prompt, GREEDY)
            if output.outputs[0].token_ids != expected[prompt]:
                wrong.append((prompt, output))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert batched.engine.is_idle


def test_abort_gives_the_last_output(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=100), request_ids=["mine"])
    next(stream)
    llm.abort("mine")
    rest = list(stream)
    assert rest[-1].outputs[0].finish_reason == "abort"
    assert rest[-1].finished
    llm.abort("nobody")


def test_a_round_that_fails_ends_what_runs_and_the_llm_goes_on(
    batched: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(batched.generate(PROMPTS, GREEDY))
    true = batched.engine._round
    calls = iter(range(100))

    def broken(*arguments: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("the device is gone")
        true(*arguments)

    monkeypatch.setattr(batched.engine, "_round", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        batched.generate(PROMPTS, GREEDY)
    assert batched.engine.is_idle
    assert tokens(batched.generate(PROMPTS, GREEDY)) == expected


def test_speculation_is_a_requests_own_choice(batched: LLM) -> None:
    plain = SpeculativeConfig(TreeShape.plain())
    (slow,) = batched.generate("hello", GREEDY, speculative=plain)
    (fast,) = batched.generate("hello", GREEDY)
    assert slow.outputs[0].token_ids == fast.outputs[0].token_ids
    assert slow.metrics.rounds == 24
    assert slow.metrics.drafted == 0
    assert fast.metrics.rounds < 24
    assert fast.metrics.accepted == fast.metrics.emitted - fast.metrics.rounds > 0
    with pytest.raises(UsageError, match="built for"):
        batched.generate("hello", GREEDY, speculative=SpeculativeConfig(TreeShape.chain(500)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "oak"}, "neither a tree nor a file"),
        ({"draft": "guessed"}, "draft should be one of topk, sampled"),
        ({"draft": "sampled", "tree": "dynamic:2,2,4"}, "need a tree that is fixed"),
        ({"backend": "abacus"}, "unknown backend"),
        ({"batch": 99}, "batch is 99"),
    ],
)
def test_arguments_that_make_no_sense(tiny_bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(tiny_bundle, **options)


def test_sampled_drafts_take_the_fixed_tree_of_the_bundles_sizes(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle, threads=1, draft="sampled")
    assert llm.engine.speculative.tree.kind == "static"
    assert len(llm.generate("hello", SAMPLED)[0].outputs[0].token_ids) == 24


def test_a_bundle_without_a_head_decodes_plainly(tmp_path: Path) -> None:
    llm = LLM(make_bundle(tmp_path / "bare", head=False), threads=1)
    assert llm.engine.speculative.tree == TreeShape.plain()
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 24


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5},
        {"stop": ["a", ""]},
        {"stop_token_ids": 5.5},
        {"stop_token_ids": ["a"]},
        {"output_kind": "everything"},
        {"temperature": "warm"},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": 2.5},
        {"n": True},
        {"seed": -1},
        {"stop": "a", "detokenize": False},
    ],
    ids=str,
)
def test_params_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_off_has_every_form_that_people_use(llm: LLM) -> None:
    base = SamplingParams(temperature=0.9, seed=3, max_tokens=16)
    (expected,) = tokens(llm.generate("hello", base))
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"stop": None}, {"stop": []}):
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=16, **off)
        assert tokens(llm.generate("hello", params)) == [expected]
