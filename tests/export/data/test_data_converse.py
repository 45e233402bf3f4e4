"""Conversations against a slow, obvious construction: the whole chat template, and one token at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.datamaker import PROMPTS, answer, generator_of, host_of, scripted
from support.decoding import Request
from support.tiny import modules_of

from eagle_export.data.conversation import Conversation, Record, around_turn, end_of_turn
from eagle_export.data.conversations import Prompt
from eagle_export.data.generator import Generator
from eagle_export.data.openings import Opening, Openings
from eagle_run.engine.offline import OfflineRequest
from eagle_run.params import SamplingParams
from eagle_run.tokenizer import Tokenizer


def greedy_answer(model: torch.nn.Module, prompt: list[int], most: int, stops: frozenset[int]) -> list[int]:
    """One full forward of the Transformers model a token."""
    tokens: list[int] = []
    while len(tokens) < most and not stops.intersection(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


def slow_greedy(target: Path, text: Tokenizer, prompt: Prompt, most: int, stops: frozenset[int]) -> Record:
    """Every turn through the whole template anew, and marks set by counting."""
    model = modules_of(target).model
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    mask: list[int] = []
    for said in prompt.turns:
        messages.append({"role": "user", "content": said})
        full = text.encode_chat(messages)
        assert full[: len(tokens)] == tokens  # each token of this tokenizer is a character: no seams
        mask += [0] * (len(full) - len(tokens))
        new = greedy_answer(model, full, most, stops)
        tokens = full + new
        mask += [1] * len(new)
        if new[-1] not in stops:
            break
        messages.append({"role": "assistant", "content": text.decode(new[:-1], skip_special_tokens=False)})
    return Record(tokens, mask, 0.0)


def test_conversations_are_those_of_a_slow_construction(generator: Generator, talking_target: Path) -> None:
    host = host_of(generator, temperatures=((0.0, 1.0),), loops="keep", max_new_tokens=20)
    harvest = answer(host)
    stops = generator.stop_token_ids
    expected = [slow_greedy(talking_target, generator.text, prompt, 20, stops) for prompt in PROMPTS]
    assert harvest.records == expected
    assert not harvest.dropped
    for record, prompt in zip(harvest.records, PROMPTS, strict=True):
        first = generator.text.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        assert record.prompt_length == len(first)
        assert record.tokens[: record.prompt_length] == first


def test_several_turns_make_one_conversation(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scripted(generator, monkeypatch, "Hi.</s>", "Then rain</s>", "So")
    [record] = answer(host_of(generator), PROMPTS[:1]).records
    whole = "<user>Hello</s><bot>Hi.</s><user>And then?</s><bot>Then rain</s><user>Why?</s><bot>So"
    encode = generator.text.encode
    assert record.tokens == encode(whole, add_special_tokens=False)
    marks = ("0" * 8) + "1111" + "0" * 12 + "1" * 10 + "0" * 7 + "11"
    assert "".join(map(str, record.mask)) == marks
    assert [list(request.prompt_token_ids) for request in asked] == [
        encode(whole[: whole.index(part)], add_special_tokens=False) for part in ("Hi.", "Then", "So")
    ]


def test_a_template_that_rewrites_answers_begins_another_conversation(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its template ends answers without the </s> that was sampled, so a chat would show other tokens."""
    generator = generator_of(tiny_target)
    scripted(generator, monkeypatch, "Hi.</s>", "Then rain</s>", "So")
    records = answer(host_of(generator), PROMPTS[:1]).records
    texts = [generator.text.decode(record.tokens, skip_special_tokens=False) for record in records]
    assert texts == [
        "<user>Hello<bot>Hi.</s>",
        "<user>Hello<bot>Hi.<user>And then?<bot>Then rain</s>",
        "<user>Hello<bot>Hi.<user>And then?<bot>Then rain<user>Why?<bot>So",
    ]
    assert [sum(record.mask) for record in records] == [4, 10, 2]
    assert all(record.mask == sorted(record.mask) for record in records)  # one answer, at the end


def test_a_system_message_comes_first(generator: Generator) -> None:
    [record] = answer(host_of(generator), (Prompt(("Hi",), "Be brief."),)).records
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert record.tokens[: record.prompt_length] == generator.text.encode_chat(start)


@pytest.mark.parametrize(
    ("loops", "words", "dropped", "said"),
    [
        ("drop", " ", "empty answer", None),
        ("drop", "</s>", "empty answer", None),
        ("drop", "ab" * 20, "answer in a loop", None),
        ("cut", "x" + "ab" * 20, None, "xabab"),
        ("keep", "ab" * 20, None, "ab" * 20),
    ],
)
def test_degenerate_answers(
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    *,
    loops: str,
    words: str,
    dropped: str | None,
    said: str | None,
) -> None:
    scripted(generator, monkeypatch, words, "never asked")
    harvest = answer(host_of(generator, loops=loops), PROMPTS[:1])
    assert dict(harvest.dropped) == ({dropped: 1} if dropped else {})
    found = [generator.text.decode(r.tokens[r.prompt_length :]) for r in harvest.records]
    assert found == ([] if said is None else [said])


def test_a_bad_later_answer_leaves_the_earlier_ones(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(generator, monkeypatch, "Hi.</s>", "ab" * 20)
    harvest = answer(host_of(generator), PROMPTS[:1])
    assert not harvest.dropped
    [record] = harvest.records
    assert generator.text.decode(record.tokens, skip_special_tokens=False) == "<user>Hello</s><bot>Hi.</s>"


def test_prompts_and_conversations_that_get_too_long(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(generator, monkeypatch, "y" * 60 + "</s>", "never asked")
    harvest = answer(host_of(generator, loops="keep"), (Prompt(("x" * 78,)), Prompt(("Hello", "z" * 20))))
    assert dict(harvest.dropped) == {"prompt too long": 1}
    assert len(harvest.records) == len(asked) == 1
    assert len(harvest.records[0].tokens) == 8 + 61


def test_self_play_asks_after_the_users_prefix(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [part.text for part in around_turn(generator.text, [])] == ["<user>", "</s><bot>"]
    tokens, strings = end_of_turn(generator.text)
    assert 1 in tokens
    assert strings == ()
    asked = scripted(generator, monkeypatch, " trees</s>", "Green.</s>", "more</s>", "No.</s>")
    host = host_of(generator, turns=2)
    monkeypatch.setattr(Openings, "draw", lambda *_: Opening("Tell of", whole=False))
    harvest = host.play(range(40))
    texts = {generator.text.decode(r.tokens, skip_special_tokens=False) for r in harvest.records}
    once = "<user>Tell of trees</s><bot>Green.</s>"
    assert texts <= {once, f"{once}<user>more</s><bot>No.</s>"}
    assert dict(harvest.dropped) == {"duplicate": 39}
    assert harvest.written == ["Tell of trees"]
    opening = generator.text.encode("<user>Tell of", add_special_tokens=False)
    assert [list(request.prompt_token_ids) for request in asked[:40]] == [opening] * 40
    assert len({request.params.seed for request in asked[:40]}) == 40


def test_what_the_target_writes_is_excluded_and_must_come_to_an_end(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Openings, "draw", lambda *_: Opening("", whole=False))
    host = host_of(generator, excluded=("one two three four",))
    scripted(generator, monkeypatch, "so one two three four then</s>")
    assert dict(host.play([0]).dropped) == {"excluded": 1}
    scripted(generator, monkeypatch, "and on and on")
    assert dict(host.play([1]).dropped) == {"unfinished prompt": 1}


def test_tokens_do_not_depend_on_the_batch(talking_target: Path) -> None:
    """Sampled and greedy, one turn and more, prompts from files and the target's own."""
    mix = ((0.0, 0.4), (0.8, 0.3), (1.2, 0.3))
    found = []
    for batch in (1, 3, 8):
        host = host_of(generator_of(talking_target, batch), temperatures=mix, turns=2)
        found.append((answer(host), host.play(range(12))))
    assert found[0] == found[1] == found[2]
    prompts, played = found[0]
    assert len({record.temperature for record in [*prompts.records, *played.records]}) == 3
    assert len(played.records) >= 4


def test_requests_keep_their_order(generator: Generator) -> None:
    def request(prompt: str, temperature: float) -> OfflineRequest:
        ids = generator.text.encode(prompt)
        sampling = SamplingParams(temperature=temperature, seed=5)
        return Request(tuple(ids), sampling, max_new_tokens=5).offline

    requests = [request("x" * length, t) for length, t in ((9, 0.0), (3, 1.0), (5, 0.0), (1, 1.0), (2, 0.0))]
    counted: list[int] = []
    together = generator.run(requests, counted.append)
    assert together == [generator.run([one], lambda _: None)[0] for one in requests]
    assert sum(counted) == 25


def test_a_closed_conversation_ends_with_an_answer(generator: Generator) -> None:
    talk = Conversation(seed=0, temperature=0.5)
    talk.ask(generator.text, "Hi")
    talk.answer(generator.text, [5, 6, 1], frozenset({1}))
    talk.ask(generator.text, "More")
    talk.close()
    talk.close()
    [record] = talk.finished
    assert record.tokens[-3:] == [5, 6, 1]
    assert record.mask[-3:] == [1, 1, 1]
