"""The one reader of JSON that others wrote: caps on size and depth, which every reader of files has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_run import datasets, json_files
from eagle_run.bundle.hashing import file_sha256
from eagle_run.bundle.loading import read_manifest
from eagle_run.datasets import read_prompts, read_questions, read_text
from eagle_run.decoding.tree_spec import parse_tree_spec
from eagle_run.errors import EagleError
from eagle_run.json_files import MAX_DEPTH, check_nesting, parse_json, read_bytes, read_json, read_json_object

DEEP = (MAX_DEPTH + 1, 900, 5_000, 200_000)  # Python's own parser gives up at some 1,000


def lists(depth: int) -> str:
    return "[" * depth + "]" * depth


def objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("nested", [lists, objects])
@pytest.mark.parametrize("depth", DEEP)
def test_nesting_has_a_limit(nested: Callable[[int], str], depth: int) -> None:
    with pytest.raises(EagleError, match=rf"^a file: lists or objects nested more than {MAX_DEPTH} deep"):
        parse_json(nested(depth), "a file")


@pytest.mark.parametrize("nested", [lists, objects])
def test_what_nests_as_deep_as_may_be_is_read(nested: Callable[[int], str]) -> None:
    assert parse_json(nested(MAX_DEPTH), "a file") == json.loads(nested(MAX_DEPTH))


def test_breadth_is_no_depth() -> None:
    data = {str(number): [[number], {}] for number in range(5000)}
    assert parse_json(json.dumps(data), "a file") == data


def test_references_that_grow_are_refused() -> None:
    """As YAML's: ten lists of ten, each of which holds the one before ten times, are 10**10 values."""
    grown: list[Any] = [0] * 10
    for _ in range(9):
        grown = [grown] * 10
    with pytest.raises(EagleError, match="more than 10,000,000 values"):
        check_nesting(grown, "a file")
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(EagleError, match="nested more than"):
        check_nesting(itself, "a file")


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('"' + "x" * 98 + '"')
    assert read_json(file, max_bytes=100) == "x" * 98
    with pytest.raises(EagleError, match=r"a\.json: larger than 99 bytes"):
        read_json(file, max_bytes=99)
    with pytest.raises(EagleError, match="larger than 1,000 bytes"):  # and what has no end is not read to it
        read_bytes(Path("/dev/zero"), max_bytes=1000)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"nothing", b'{"a": ' + b"1" * 5000 + b"}"])
def test_what_is_no_json_is_named_with_the_hint(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(EagleError, match=r"a\.json: not readable as JSON: ") as caught:
        read_json(file, hint="fetch it again")
    assert caught.value.hint == "fetch it again"


def test_objects_are_told_from_other_values(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')  # some files begin with a byte order mark
    assert read_json_object(file) == {"a": 1}
    file.write_text("[]")
    with pytest.raises(EagleError, match="expected a JSON object, found list"):
        read_json_object(file)
    with pytest.raises(EagleError, match="cannot be read: No such file"):
        read_json_object(tmp_path / "none.json")


# Who reads with it


def manifest(path: Path) -> None:
    (path.parent / "manifest.json").write_bytes(path.read_bytes())
    read_manifest(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "manifest": manifest,
    "prompts": read_prompts,
    "questions": read_questions,
    "tree": lambda path: parse_tree_spec(str(path)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("nested", [lists, objects])
def test_the_runtimes_files_are_read_with_caps(
    reader: str, nested: Callable[[int], str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text(nested(20_000))
    with pytest.raises(EagleError, match="nested more than"):
        READERS[reader](file)


def test_a_line_of_a_data_set_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file itself has none."""
    monkeypatch.setattr(datasets, "MAX_BYTES", 100)
    file = tmp_path / "q.jsonl"
    file.write_text('"short"\n' * 100)
    assert len(read_prompts(file)) == 100
    file.write_text('"short"\n"' + "x" * 100 + '"\n')
    with pytest.raises(EagleError, match=r"q\.jsonl, line 2: longer than 100 bytes"):
        read_prompts(file)


def test_a_byte_that_is_no_text_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes('\ufeff"é"\n'.encode() + b'"caf\xe9"\n')
    with pytest.raises(EagleError, match=r"not UTF-8: byte 0xe9 at offset 12"):
        read_prompts(file)
    with pytest.raises(EagleError, match=r"not UTF-8: byte 0xe9 at offset 12"):
        read_text(file)


def test_a_damaged_cache_of_hashes_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a"
    file.write_bytes(b"1")
    expected = file_sha256(file)
    known = tmp_path / "cache" / "eagle-run" / "hashes.json"
    known.write_text(lists(5000))
    assert file_sha256(file) == expected
    assert len(json_files.read_json(known)) == 1
