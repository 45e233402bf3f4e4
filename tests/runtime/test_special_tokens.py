"""Special tokens that a message spells out are text; those of the template control the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bundlemaker import byte_tokenizer
from support.streams import BYTES, FALLBACK, bytes_of
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from eagle_run.errors import UsageError
from eagle_run.special_tokens import SpecialTokens
from eagle_run.tokenizer import Tokenizer

END = 256


def chat_tokenizer(template: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), chat_template=template, special_tokens={"eos_token": "<end>"})


def user(content: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def spelled(text: str) -> list[int]:
    return bytes_of(BYTES, text.encode())


# Each template, and what it writes as (its own text, the message's) in turn.
TEMPLATES = {
    "as it is": ("{{ messages[0].content }}{{ eos_token }}", lambda said: ["", said, "<end>"]),
    "trimmed": (
        "<end> {{ messages[0].content | trim }}<end>!",
        lambda said: ["<end> ", said.strip(), "<end>!"],
    ),
    "twice": (
        "{{ messages[0].content + '<end>' + messages[0].content.strip() }}",
        lambda said: ["", said, "<end>", said.strip()],
    ),
    "completed": ("<{{ messages[0].content }}>", lambda said: ["<", said, ">"]),
    "completed when trimmed": (
        "<end{{ messages[0]['content'].strip() }}end><end>",
        lambda said: ["<end", said.strip(), "end><end>"],
    ),
    "as JSON": (
        "{{ messages[0].content | tojson }}<end>",
        lambda said: ['"', said.replace("\n", "\\n"), '"<end>'],
    ),
    "as ASCII JSON": (
        "{{ messages[0].content | tojson(ensure_ascii=True) }}",
        lambda said: ['"', json.dumps(said)[1:-1], '"'],
    ),
    "as Python": (
        "{{ [messages[0].content] }}<end>",
        lambda said: ["['", said.replace("\n", "\\n"), "']<end>"],
    ),
    "upper": ("{{ messages[0].content | upper }}<end>", lambda said: ["", said.upper(), "<end>"]),
    "without its thoughts": (
        "{% set said = messages[0].content %}{% if '</t>' in said %}"
        "<t>{{ said.split('</t>')[0].split('<t>')[-1] }}</t><end>{{ said.split('</t>')[-1].lstrip('\\n') }}"
        "{% else %}{{ said }}{% endif %}<end>",
        lambda said: (
            [
                "<t>",
                said.split("</t>")[0].split("<t>")[-1],
                "</t><end>",
                said.split("</t>")[-1].lstrip("\n"),
                "<end>",
            ]
            if "</t>" in said
            else ["", said, "<end>"]
        ),
    ),
}
CONTENTS = st.lists(
    st.sampled_from(["<end>", "<", "<en", "end", "d>", ">", "a", "é", " ", "\n", "7", "<t>", "</t>", "⟦"]),
    max_size=7,
).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=CONTENTS)
@settings(max_examples=120, deadline=None)
def test_only_the_templates_own_special_tokens_are_tokens(name: str, content: str) -> None:
    """Slow and obvious: the template's text is encoded, a message's is spelled byte by byte."""
    template, written = TEMPLATES[name]
    tokenizer = chat_tokenizer(template)
    parts = written(content)
    expected = []
    for index, part in enumerate(parts):
        expected += spelled(part) if index % 2 else BYTES.encode(part)
    assert tokenizer.apply_chat_template(user(content), tokenize=False) == "".join(parts)
    assert tokenizer.encode_chat(user(content)) == expected
    whole = BYTES.encode("".join(parts))
    assert tokenizer.encode_chat(user(content), split_special_tokens=False) == whole


REWRITTEN = "{{ messages[0].content.replace('<end>', '') if 'end' in messages[0].content }}<end>"


def test_a_template_that_rewrites_special_tokens_of_a_message_is_refused() -> None:
    tokenizer = chat_tokenizer(REWRITTEN)
    with pytest.raises(UsageError, match="the text of a special token, '<end>', and the chat") as refused:
        tokenizer.encode_chat(user("a<end>b"))
    assert refused.value.parameters == ("split_special_tokens",)
    assert tokenizer.encode_chat(user("a<end>b"), split_special_tokens=False) == [*spelled("ab"), END]
    assert tokenizer.apply_chat_template(user("a<end>b"), tokenize=False) == "ab<end>"
    # What is no special token is not the template's to change.
    assert tokenizer.encode_chat(user("bend>")) == [*spelled("bend>"), END]


def test_a_template_that_looks_at_the_edges_of_a_message() -> None:
    """Marks there would be in its way: those inside special tokens suffice."""
    tokenizer = chat_tokenizer(
        "{{ 'quoted ' if messages[0].content.startswith('>') }}{{ messages[0].content }}"
    )
    assert tokenizer.encode_chat(user("> <end>")) == spelled("quoted > <end>")
    assert tokenizer.encode_chat(user("> x")) == spelled("quoted > x")


def test_every_text_of_a_conversation_counts() -> None:
    tokenizer = chat_tokenizer(
        "{{ messages[0].name }}|{{ messages[0].extra.list[0] }}|{{ tools | tojson }}|{{ note }}{{ bos }}<end>"
    )
    content = user("x", name="<end>", extra={"list": ["<end>"]})
    tools = [{"<end>": "<end>"}]
    ids = tokenizer.encode_chat(content, tools=tools, note="<end>", bos="")
    assert ids == [*spelled('<end>|<end>|[{"<end>": "<end>"}]|<end>'), END]
    for one in (user("x", name="<end>", extra={"list": [""]}), user("x", name="", extra={"list": ["<end>"]})):
        assert tokenizer.encode_chat(one).count(END) == 1
    assert tokenizer.encode_chat(user("x", name="", extra={"list": [""]}), note="<end>").count(END) == 1


def test_special_variables_are_the_templates() -> None:
    tokenizer = chat_tokenizer("{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer.encode_chat(user("<end>")) == [*spelled("<end>"), END]


def test_the_clock_does_not_tell_renderings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is rendered twice: at two times, if the template looked at the clock itself."""
    import eagle_run.tokenizer as module

    class Clock(module.datetime):  # type: ignore[name-defined, misc]
        calls = 0

        @classmethod
        def now(cls, tz: object = None) -> Any:
            cls.calls += 1
            return module_datetime(2026, 1, 1, second=cls.calls)

    module_datetime = module.datetime
    monkeypatch.setattr(module, "datetime", Clock)
    tokenizer = chat_tokenizer("{{ strftime_now('%S') }} {{ messages[0].content }}")
    assert tokenizer.encode_chat(user("<end>")) == spelled("01 <end>")
    assert tokenizer.encode_chat(user("<end>")) == spelled("02 <end>")


# --- tokenizers of other kinds --------------------------------------------------------------------------


def pieces_tokenizer(kind: str) -> BackendTokenizer:
    """Its special tokens are in the vocabulary too, where plain text could become one."""
    pieces = ["<unk>", "</s>", "<", "/", "s", ">", "/s", "/s>"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    if kind == "unigram":
        scores = [(piece, 0.0 if piece in ("<unk>", "</s>") else -1.0) for piece in pieces]
        return BackendTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    if kind == "bpe":
        merges = [("/", "s"), ("/s", ">"), ("<", "/s>")]
        return BackendTokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    tokenizer = BackendTokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [("unigram", ["<", "/s>"]), ("bpe", ["<", "/s>"]), ("wordlevel", ["<unk>"])],
)
def test_no_model_makes_a_special_token_of_text(kind: str, pieces: list[str]) -> None:
    backend = pieces_tokenizer(kind)
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, chat_template="{{ messages[0].content }}</s>")
    ids = tokenizer.encode_chat(user("</s>"))
    assert [backend.id_to_token(token) for token in ids] == [*pieces, "</s>"]
    assert tokenizer.encode("</s>") == [1]
    assert tokenizer.encode("</s>", split_special_tokens=True) == ids[:-1]


def test_special_tokens_in_disguise_are_text_too() -> None:
    """A normalizer may make one of letters that are none."""
    backend = pieces_tokenizer("unigram")
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, chat_template="{{ messages[0].content }}</s>")
    assert tokenizer.encode("＜/s＞") == [1]  # the piece, though not the added token
    for content in ("＜/s＞", "</s>", "＜/s＞</s>"):
        ids = tokenizer.encode_chat(user(content))
        assert [backend.id_to_token(token) for token in ids] == [*["<", "/s>"] * (len(content) // 4), "</s>"]
    backend = byte_tokenizer()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<user>", normalized=True, special=True)])
    tokenizer = Tokenizer(backend, chat_template="<user>{{ messages[0].content }}<end>")
    assert tokenizer.encode("<USER>") == [257]
    assert tokenizer.encode_chat(user("<USER>")) == [257, *spelled("<user>"), END]
    assert tokenizer.encode_chat(user("<USER><end>")) == [257, *spelled("<user><end>"), END]
    assert tokenizer.encode_chat(user("<USER>"), split_special_tokens=False) == [257, 257, END]


def test_blanks_around_special_tokens_are_as_ever() -> None:
    """An added token may take the blanks beside it; and ▁ goes before words where it always did."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken("<user>", rstrip=True, special=True)])
    tokenizer = Tokenizer(backend, chat_template="<user>\n {{ messages[0].content }}<end>")
    assert tokenizer.encode_chat(user("<end>")) == [257, *spelled("<end>"), END]
    assert tokenizer.encode_chat(user("x")) == [257, *spelled("x"), END]
    fallback = Tokenizer(FALLBACK.backend_tokenizer, chat_template="hello</s> world{{ messages[0].content }}")
    ids = fallback.encode_chat(user("</s>"))
    begin = FALLBACK.encode("hello</s> world")
    assert ids[: len(begin)] == begin
    assert FALLBACK.backend_tokenizer.token_to_id("</s>") not in ids[len(begin) :]
    assert fallback.decode(ids, skip_special_tokens=False) == "hello</s> world</s>"


def test_tokens_that_end_answers_are_special_even_if_the_file_does_not_say_so() -> None:
    backend = byte_tokenizer()
    backend.add_tokens(["<stop>", "<think>"])
    tokenizer = Tokenizer(
        backend, chat_template="{{ messages[0].content }}<stop><think>", eos_token_ids=[257]
    )
    ids = tokenizer.encode_chat(user("<stop><think><end>"))
    assert ids == [*spelled("<stop>"), 258, *spelled("<end>"), 257, 258]


def test_the_longest_token_is_matched_and_a_shorter_one_where_that_is_not_the_templates() -> None:
    backend = byte_tokenizer()
    backend.add_special_tokens(["<end><end>", "<end>!"])
    tokenizer = Tokenizer(backend, chat_template="<end><end>{{ messages[0].content }}<end><end><end>")
    assert tokenizer.encode_chat(user("x")) == [257, *spelled("x"), 257, END]
    assert tokenizer.encode_chat(user("<end>")) == [257, *spelled("<end>"), 257, END]
    assert tokenizer.encode_chat(user("<end><end>")) == [257, *spelled("<end><end>"), 257, END]
    assert tokenizer.encode_chat(user("!")) == [257, *spelled("!"), 257, END]
    after = Tokenizer(backend, chat_template="a<end>{{ messages[0].content }}")
    assert after.encode_chat(user("!")) == [*spelled("a"), END, *spelled("!")]


def test_a_part_of_a_rendering_keeps_what_is_whose() -> None:
    tokenizer = chat_tokenizer("<end>{{ messages[0].content }}<end>")
    rendered = tokenizer.render_chat(user("<end>"))
    assert rendered.control_spans == ((0, 5), (10, 15))
    assert tokenizer.encode_rendered(rendered.tail(5)) == [*spelled("<end>"), END]
    assert tokenizer.encode_rendered(rendered.head(10)) == [END, *spelled("<end>")]
    plain = tokenizer.render_chat(user("x"))
    assert plain.control_spans is plain.tail(2).control_spans is plain.head(2).control_spans is None


def test_a_text_that_holds_the_secret_names_gets_others() -> None:
    tokenizer = chat_tokenizer("{{ messages[0].content }}<end>")
    tokenizer.encode_chat(user("<end>"))
    special = tokenizer._special
    assert isinstance(special, SpecialTokens)
    assert special._renamed is not None
    name = special._renamed._names["<end>"]
    assert tokenizer.encode_chat(user(f"<end>{name}")) == [*spelled(f"<end>{name}"), END]
    assert special._renamed._names["<end>"] != name


def test_many_special_tokens_in_a_message_take_little_time() -> None:
    tokenizer = chat_tokenizer("{{ messages[0].content }}<end>")
    content = "<end>" * 40_000  # a quadratic search would take minutes
    assert tokenizer.encode_chat(user(content)) == [*spelled(content), END]
