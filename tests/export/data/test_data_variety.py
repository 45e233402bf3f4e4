"""Duplicates, benchmark prompts, degenerate answers, openings and seeds: the parts that need no target."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from eagle_export.data.openings import read_openings
from eagle_export.data.quality import is_empty, loop_criterion, loop_start, without_loop
from eagle_export.data.settings import DataSettings, mixed, parse_temperatures, pick_temperature
from eagle_export.data.variety import Excluded, Seen, normalised, signature
from eagle_run.errors import EagleError, UsageError

LONG = "Write a story about a lighthouse keeper who finds a letter in a bottle on the first day of winter"


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        (LONG, "duplicate"),
        (f"  {LONG.upper()}.", "duplicate"),
        (LONG.replace(" letter", "\n letter"), "duplicate"),
        (LONG.replace("winter", "spring"), "near-duplicate"),
        ("Write a poem about a shepherd who loses a coat in the woods on the last day of summer", None),
    ],
)
def test_what_counts_as_seen(again: str, reason: str | None) -> None:
    seen = Seen(0.7)
    assert seen.add(LONG) is None
    assert seen.add(again) == reason


def test_without_near_only_equal_prompts_are_seen() -> None:
    seen = Seen(1.0)
    assert seen.add(LONG) is None
    assert seen.add(LONG.replace("winter", "spring")) is None
    assert seen.add(LONG + "!") == "duplicate"


def test_other_numbers_are_another_prompt() -> None:
    seen = Seen(0.7)
    assert [seen.add(f"What is {a} + {b}?") for a, b in itertools.product((2, 3, 50), (4, 5, 61))] == [
        None
    ] * 9


def test_signatures_estimate_the_overlap_of_word_triples() -> None:
    """Against the overlap counted out, on pairs from far apart to almost equal."""
    rng = random.Random(0)
    for changes in (1, 4, 10, 30):
        words = [rng.choice("abcdefghijklmnop") * rng.randint(1, 3) for _ in range(120)]
        other = list(words)
        for place in rng.sample(range(120), changes):
            other[place] = "zzz"
        triples = [{tuple(text[i : i + 3]) for i in range(118)} for text in (words, other)]
        exact = len(triples[0] & triples[1]) / len(triples[0] | triples[1])
        estimate = np.mean(signature(" ".join(words)) == signature(" ".join(other)))
        assert abs(estimate - exact) < 0.2, (changes, exact)  # four standard errors at 64 hashes, at most


def test_a_prompt_of_a_benchmark_is_recognised_inside_another() -> None:
    excluded = Excluded([LONG, "Name two big rivers", "Why?"], 8)
    assert excluded.hits(f"Please: {LONG.lower()}, with a twist")
    assert excluded.hits("Once a keeper who finds a letter in a bottle on a beach")  # 8 words in a row
    assert not excluded.hits("Once a keeper who finds a letter in the bottle on a beach")  # 7 at most
    assert excluded.hits("Can you name two big rivers in Asia?")  # a short one counts as a whole
    assert not excluded.hits("Name two big lakes")
    assert excluded.hits("why")
    assert not excluded.hits("Why is the sky blue?")


def test_loops_are_found_where_they_begin() -> None:
    rng = random.Random(1)
    text = [rng.randrange(10_000) for _ in range(60)]
    assert loop_start(text) is None
    assert loop_start([*text, *[7] * 23]) is None
    assert loop_start([*text, *[7] * 24]) == (60, 1)
    phrase = list(range(20_000, 20_030))
    assert loop_start([*text, *phrase * 3]) is None
    assert loop_start([*text, *phrase * 4, 5, 6]) == (60, 30)
    assert without_loop([*text, *phrase * 9]) == [*text, *phrase * 2]
    assert without_loop(text) == text


def slow_loop_start(tokens: list[int]) -> tuple[int, int] | None:
    """Every period by itself, on the whole answer."""
    found = []
    for period in range(1, 97):
        equal = [at >= period and tokens[at] == tokens[at - period] for at in range(len(tokens))]
        needed = max(4 * period, 24) - period
        starts = [
            at - period for at in range(period, len(tokens) - needed + 1) if all(equal[at : at + needed])
        ]
        found += [(starts[0], period)] if starts else []
    return min(found, default=None)


def answers_with_loops() -> list[list[int]]:
    """Some end as they loop, some go on; some loops are part of a longer one that begins earlier."""
    rng = random.Random(5)
    found = []
    for kinds in (1, 2, 3, 50) * 40:

        def some(most: int, kinds: int = kinds) -> list[int]:
            return [rng.randrange(kinds) for _ in range(rng.randrange(most))]

        dashes = [*some(20), *[7] * rng.choice((0, 20, 24, 40)), *some(20)]
        found.append([*some(40), *(dashes or [1]) * rng.choice((1, 3, 4, 6)), *some(200)])
    return found


def test_the_first_loop_is_that_of_the_obvious_search() -> None:
    answers = answers_with_loops()
    expected = [slow_loop_start(tokens) for tokens in answers]
    assert [loop_start(tokens) for tokens in answers] == expected
    assert 20 < sum(loop is None for loop in expected) < len(expected) - 60


def test_an_answer_that_ends_in_its_loop_is_that_which_is_cut_afterwards() -> None:
    """As soon as `loop_criterion` ends it, nothing that could follow changes what is kept."""
    saved = 0
    for tokens in answers_with_loops():
        ends = loop_criterion()
        end = next((at + 1 for at, token in enumerate(tokens) if ends(token)), len(tokens))
        assert without_loop(tokens[:end]) == without_loop(tokens)
        assert end == len(tokens) or loop_start(tokens) is not None
        saved += len(tokens) - end
    assert saved > 1000


def test_dashes_in_a_paragraph_that_repeats_are_not_its_first_loop() -> None:
    paragraph = [1, 2, 3, *[7] * 30, 4, 5]
    tokens = [9, *paragraph * 8]
    assert loop_start(tokens[:34]) == (4, 1)
    assert loop_start(tokens) == (1, 35)
    ends = loop_criterion()
    end = next(at + 1 for at, token in enumerate(tokens) if ends(token))
    assert end == 1 + 4 * 35


def test_empty_answers() -> None:
    assert is_empty(" \n")
    assert is_empty("\ufffd \ufffd")
    assert not is_empty(" 4")


def test_temperatures_and_their_shares() -> None:
    assert parse_temperatures("0.7") == ((0.7, 1.0),)
    mix = parse_temperatures("0:2,1.0:1,0.5:1")
    assert mix == ((0.0, 0.5), (1.0, 0.25), (0.5, 0.25))
    settings = DataSettings(self_play=1, temperatures=mix)
    count = Counter(pick_temperature(settings, mixed(0, i)) for i in range(8000))
    for temperature, share in mix:
        assert abs(count[temperature] / 8000 - share) < 0.03
    for bad in ("", "warm", "-1", "1:0", "0:1,,1:1", "nan", "inf"):
        with pytest.raises(UsageError, match="temperatures with their shares") as caught:
            parse_temperatures(bad)
        assert caught.value.parameters == ("temperatures",)


def test_seeds_are_functions_of_their_numbers() -> None:
    seeds = {mixed(*numbers) for numbers in itertools.product(range(20), repeat=3)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_built_in_openings_are_many_and_of_many_kinds() -> None:
    openings = read_openings(None)
    assert len(openings.sections) >= 12
    drawn = [openings.draw(mixed(3, i)) for i in range(3000)]
    assert [openings.draw(mixed(3, i)) for i in range(3000)] == drawn
    assert len({opening.text for opening in drawn}) > 1200
    assert any(opening.whole for opening in drawn)
    assert any(opening.text == "" for opening in drawn)
    assert not any("{" in opening.text or "<" in opening.text for opening in drawn)
    assert not any(opening.text.endswith(" ") for opening in drawn)


def test_openings_of_a_users_own(tmp_path: Path) -> None:
    file = tmp_path / "openings.txt"
    file.write_text(
        "# mine\n@fruit: apple | pear\n@basket: {2-3} {fruit}s\n\n[one] 3\nBuy {basket}\n"
        "[two]\n{{x}}\\n{a|b}<end>\n<free>\n"
    )
    openings = read_openings(file)
    drawn = Counter((o.text, o.whole) for o in (openings.draw(mixed(i)) for i in range(4000)))
    bought = {f"Buy {number} {fruit}s" for number in (2, 3) for fruit in ("apple", "pear")}
    assert set(drawn) == {(text, False) for text in bought} | {
        ("{x}\na", True),
        ("{x}\nb", True),
        ("", False),
    }
    assert abs(sum(drawn[text, False] for text in bought) / 4000 - 0.75) < 0.03


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", ["no openings"]),
        ("Buy {fruit}\n", ["line 1", "'fruit'", "@fruit"]),
        ("one\nBuy {9-2}\n", ["line 2", "'9-2'"]),
        ("@fruit apple\nx\n", ["line 1", "@fruit: apple"]),
    ],
)
def test_openings_that_are_wrong(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "openings.txt"
    file.write_text(text)
    with pytest.raises(EagleError) as caught:
        read_openings(file)
    assert all(word in str(caught.value) for word in words)


def test_lists_that_name_each_other_end_in_an_error(tmp_path: Path) -> None:
    file = tmp_path / "openings.txt"
    file.write_text("@a: {b}\n@b: {a}\nsay {a}\n")
    with pytest.raises(EagleError, match="without end"):
        read_openings(file).draw(0)


def test_normalised_text() -> None:
    assert normalised(" Ｗhat  is\tIT?! ") == "what is it"


def test_a_benchmark_in_a_script_without_blanks_is_found() -> None:
    asked = "请把下面的句子翻译成英语并解释其含义"
    excluded = Excluded([asked], 8)
    assert excluded.hits(f"你好，{asked}，谢谢")
    assert not excluded.hits("请给我写一首关于秋天的诗")
    seen = Seen(0.7)
    assert seen.add(asked) is None
    assert seen.add(f"{asked}吧") == "near-duplicate"
    assert seen.add("请给我写一首关于秋天的诗") is None
