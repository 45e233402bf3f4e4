from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.streams import BYTES, FALLBACK, bytes_of, stream

from eagle_run.errors import UsageError
from eagle_run.tokenizer import Detokenizer, StopStrings

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


# --- stop strings ---------------------------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Slow and obvious: read letter by letter, stop when the text ends with a stop string (the longest)."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=20, max_size=20),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_at_the_same_place_however_text_arrives(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    stopper, shown, at = StopStrings(stops), "", 0
    for size in sizes:
        piece, stopped = stopper.push(text[at : at + size])
        shown, at = shown + piece, at + size
        expected, found = cut(text[:at], stops)
        assert stopped == stopper.stopped == found
        if found:
            assert shown == expected
        else:  # all is out but what may be the beginning of a stop string, and no more than that is held
            held = text[len(shown) : at]
            assert text[:at] == shown + held
            ends = [text[:at][i:] for i in range(len(text[:at]))]
            assert held == next((end for end in ends if any(s.startswith(end) for s in stops)), "")
    rest = stopper.flush()
    assert shown + rest == cut(text, stops)[0]


def test_nothing_comes_after_a_stop() -> None:
    stopper = StopStrings(["END"])
    assert stopper.push("a E") == ("a ", False)
    assert stopper.push("ND more") == ("", True)
    assert stopper.push("text") == ("", True)
    assert stopper.flush() == ""


def test_an_empty_stop_string_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopStrings(["a", ""])
