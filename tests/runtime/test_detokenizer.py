from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.streams import BYTES, FALLBACK, bytes_of, sorted_alphabet, stream
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from eagle_run.detokenizer import Detokenizer, StopStrings
from eagle_run.errors import UsageError
from eagle_run.tokenizer import Tokenizer

# --- incremental decoding -------------------------------------------------------------------------------


def test_unfinished_characters_are_held_back() -> None:
    assert stream(BYTES, bytes_of(BYTES, "a€b".encode())) == ["a", "", "", "€", "b", ""]
    assert stream(BYTES, bytes_of(BYTES, "a€".encode()[:-1])) == ["a", "", "", "\ufffd"]
    assert stream(BYTES, bytes_of(BYTES, b"\xff\xffa")) == ["", "", "\ufffd\ufffda", ""]
    ids = FALLBACK.backend_tokenizer.token_to_id
    fallback = [ids(token) for token in ("▁hello", "<0xE2>", "<0x82>", "<0xAC>", "▁world")]
    assert stream(FALLBACK, fallback) == ["hello", "", "", "€", " world", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    end = FALLBACK.backend_tokenizer.token_to_id("</s>")
    hello, world = (FALLBACK.backend_tokenizer.token_to_id(t) for t in ("▁hello", "▁world"))
    assert stream(FALLBACK, [hello, end, world]) == ["hello", "", " world", ""]
    shown = "".join(stream(FALLBACK, [hello, end, world], skip_special_tokens=False))
    assert shown == FALLBACK.decode([hello, end, world], skip_special_tokens=False)


@given(data=st.binary(max_size=80) | st.text(max_size=40).map(str.encode), size=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_whole_for_any_bytes(data: bytes, size: int) -> None:
    ids = bytes_of(BYTES, data)
    assert "".join(stream(BYTES, ids, size)) == BYTES.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("data", [b"\x80" * 300, b"\xf0\x9f" * 150, b"\xf0\x9f\x99" * 100 + "🙂".encode()])
def test_long_garbage_is_streamed_and_stays_cheap(data: bytes) -> None:
    ids = bytes_of(BYTES, data)
    detokenizer = Detokenizer(BYTES)
    longest, whole = 0, ""
    for token in ids:
        whole += detokenizer.push([token])
        longest = max(longest, len(detokenizer._context) + len(detokenizer._pending))
    assert longest <= 64
    assert whole
    assert whole + detokenizer.flush() == data.decode(errors="replace")


@given(
    text=st.lists(st.sampled_from(["hello", " ", "ab", "é", "日", "🙂🙂", "1.", " world"]), max_size=15).map(
        "".join
    )
)
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_whole_with_byte_fallback(text: str) -> None:
    ids = FALLBACK.encode(text)
    assert "".join(stream(FALLBACK, ids)) == FALLBACK.decode(ids)


FALLBACK_PIECES = ["▁hello", "▁world", "▁", "a", "1", "</s>"]
FALLBACK_BYTES = ["<0x41>", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0x9F>", "<0x99>"]


def fallback_text(pieces: Sequence[str]) -> str:
    """Slow and obvious: of bytes in a row the longest beginning that is text, and U+FFFD for each other."""
    text = ""
    for is_byte, run in groupby(pieces, key=lambda piece: piece.startswith("<0x")):
        if is_byte:
            data = bytes(int(piece[3:5], 16) for piece in run)
            size = next(
                n for n in range(len(data), -1, -1) if data[:n].decode(errors="ignore").encode() == data[:n]
            )
            text += data[:size].decode() + "\ufffd" * (len(data) - size)
        else:
            text += "".join(run).replace("▁", " ")
    return text.removeprefix(" ")


@given(
    pieces=st.lists(st.sampled_from(FALLBACK_PIECES + FALLBACK_BYTES), max_size=20), size=st.integers(1, 5)
)
@settings(max_examples=400, deadline=None)
def test_bytes_that_are_no_character_spoil_nothing_before_them(pieces: list[str], size: int) -> None:
    ids = [FALLBACK.backend_tokenizer.token_to_id(piece) for piece in pieces]
    shown = "".join(stream(FALLBACK, ids, size))
    assert shown == fallback_text([piece for piece in pieces if piece != "</s>"])
    if "\ufffd" not in shown:
        assert shown == FALLBACK.decode(ids)


# --- stop strings ---------------------------------------------------------------------------------------


def cut(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """Slow and obvious: read letter by letter, stop when the text ends with a stop string (the longest)."""
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_at_the_same_place_however_text_arrives(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    stopper, shown, at = StopStrings(stops, include_stop_str_in_output=include), "", 0
    for size in sizes:
        piece, stopped = stopper.push(text[at : at + size])
        shown, at = shown + piece, at + size
        expected, reached = cut(text[:at], stops, include)
        assert stopper.reached == reached
        assert stopped == stopper.stopped == (reached is not None)
        if stopped:
            assert shown == expected
        else:  # all is out but what may be the beginning of a stop string, and no more than that is held
            held = text[len(shown) : at]
            assert text[:at] == shown + held
            ends = [text[:at][i:] for i in range(len(text[:at]))]
            assert held == next((end for end in ends if any(s.startswith(end) for s in stops)), "")
    rest = stopper.flush()
    assert shown + rest == cut(text, stops, include)[0]


def test_nothing_comes_after_a_stop() -> None:
    stopper = StopStrings(["END"])
    assert stopper.reached is None
    assert stopper.push("a E") == ("a ", False)
    assert stopper.push("ND more") == ("", True)
    assert stopper.push("text") == ("", True)
    assert stopper.flush() == ""
    assert stopper.reached == "END"


def test_an_empty_stop_string_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopStrings(["a", ""])


# --- from tokens to the text before a stop string -------------------------------------------------------

# Tokens of bytes, as byte-level tokenizers have: of several characters, of a part of one, of both.
PIECES = [
    *(piece.encode() for piece in ("a", "b", "ab", "ba", "STOP", "ST", "OP", "OP!", " x", "\n", "é", "日本")),
    "€".encode()[:1],
    "€".encode()[1:],
    "€".encode()[:2],
    "€".encode()[2:] + b"a",
    b"b" + "🙂".encode()[:3],
    "🙂".encode()[3:] + b"STO",
    b"P" + "é".encode()[:1],
    "é".encode()[1:],
]
END = len(PIECES)


def pieces_tokenizer() -> Tokenizer:
    letters = sorted_alphabet()
    vocabulary = {"".join(letters[byte] for byte in piece): number for number, piece in enumerate(PIECES)}
    backend = BackendTokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


TOKENIZER = pieces_tokenizer()


def ids_of(*pieces: str | bytes) -> list[int]:
    return [PIECES.index(piece.encode() if isinstance(piece, str) else piece) for piece in pieces]


def answer(
    groups: Iterable[Sequence[int]],
    stops: Sequence[str],
    end_ids: Collection[int] = (),
    include: bool = False,
) -> tuple[list[str], str | None]:
    """What is shown after each group of tokens and at the end, and the stop string that was reached."""
    detokenizer, stopper = Detokenizer(TOKENIZER), StopStrings(stops, include_stop_str_in_output=include)
    shown = []
    for group in groups:
        kept = list(takewhile(lambda token: token not in end_ids, group))
        text, stopped = stopper.push(detokenizer.push(kept))
        shown.append(text)
        if stopped or len(kept) < len(group):
            break
    shown.append(stopper.push(detokenizer.flush())[0])
    shown.append(stopper.flush())
    return shown, stopper.reached


def expected_answer(
    ids: Sequence[int], stops: Sequence[str], end_ids: Collection[int], include: bool
) -> tuple[str, str | None]:
    """Slow and obvious: decode all, and cut at the earliest complete stop string."""
    kept = list(takewhile(lambda token: token not in end_ids, ids))
    return cut(TOKENIZER.decode(kept), stops, include)


EURO, SMILE = "€".encode(), "🙂".encode()
CASES = {
    "a beginning at the end of the stream": (ids_of("a", "ST"), ["STOP"], ["a", "", "", "ST"], None),
    "a beginning that goes on otherwise": (
        ids_of("ST", "ST", "a"),
        ["STOP"],
        ["", "ST", "STa", "", ""],
        None,
    ),
    "over several tokens": (ids_of("b", "ST", "OP", "a"), ["STOP"], ["b", "", "", "", ""], "STOP"),
    "in the middle of a token": (ids_of("a", "OP!"), ["P"], ["a", "O", "", ""], "P"),
    "one is the beginning of another": (
        ids_of("a", "ST", "OP!"),
        ["STOP!", "STO"],
        ["a", "", "", "", ""],
        "STO",
    ),
    "one is the end of another": (ids_of("a", "ST", "OP"), ["OP", "STOP"], ["a", "", "", "", ""], "STOP"),
    "one is inside another": (ids_of("STOP", "a"), ["STOPa", "TO"], ["S", "", ""], "TO"),
    "from one token's bytes to another's": (
        ids_of(b"b" + SMILE[:3], SMILE[3:] + b"STO"),
        ["🙂S"],
        ["b", "", "", ""],
        "🙂S",
    ),
    "ends in the bytes of a token": (
        ids_of("a", EURO[:2], EURO[2:] + b"a"),
        ["a€"],
        ["", "", "", "", ""],
        "a€",
    ),
    "before an unfinished character": (ids_of("ST", "OP", EURO[:2]), ["STOP"], ["", "", "", ""], "STOP"),
    "the end token first": (
        [*ids_of("a", "ST"), END, *ids_of("OP")],
        ["STOP"],
        ["a", "", "", "", "ST"],
        None,
    ),
    "the end token in a stop string": (
        [*ids_of("ST"), END, *ids_of("OP")],
        ["STOP"],
        ["", "", "", "ST"],
        None,
    ),
    "an unfinished character at the end": (ids_of("a", EURO[:2]), ["\ufffd"], ["a", "", "", ""], "\ufffd"),
    "beginnings of two": (ids_of("ab", "a"), ["abab", "bac"], ["", "", "", "aba"], None),
}


@pytest.mark.parametrize(("ids", "stops", "shown", "reached"), CASES.values(), ids=CASES)
def test_tokens_are_shown_up_to_a_stop_string(
    ids: list[int], stops: list[str], shown: list[str], reached: str | None
) -> None:
    groups = [[token] for token in ids]
    assert answer(groups, stops, {END}) == (shown, reached)
    assert expected_answer(ids, stops, {END}, False) == ("".join(shown), reached)
    with_stop, again = answer(groups, stops, {END}, include=True)
    assert (with_stop := "".join(with_stop)) == "".join(shown) + (reached or "")
    assert again == reached
    assert expected_answer(ids, stops, {END}, True) == (with_stop, reached)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_streamed_text_is_the_decoded_text_up_to_the_stop(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, END), max_size=14))
    letters = st.sampled_from(["a", "b", "S", "T", "O", "P", "é", "€", "🙂", "日", "\ufffd", " "])
    made_up = st.lists(letters, min_size=1, max_size=4).map("".join)
    text = TOKENIZER.decode(ids)
    parts = st.builds(lambda at, size: text[at : at + size] or "a", st.integers(0, 20), st.integers(1, 5))
    stops = data.draw(st.lists(made_up | parts, max_size=4))
    end_ids = data.draw(st.sampled_from([(), (END,), (END, 0)]))
    include = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    groups = [ids[begin:end] for begin, end in pairwise(cuts)]
    shown, reached = answer(groups, stops, end_ids, include)
    assert ("".join(shown), reached) == expected_answer(ids, stops, end_ids, include)
