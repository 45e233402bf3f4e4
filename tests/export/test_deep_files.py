"""Files that nest thousands deep, in every place where the exporter reads JSON or YAML: a clear refusal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle_export.checkpoints import fp8_schemes
from eagle_export.checkpoints.fp8_scales import Scales
from eagle_export.checkpoints.stored import stored_tensors
from eagle_export.checkpoints.weights import check_folder, model_files, read_header
from eagle_export.data.conversations import read_conversations
from eagle_export.data.shards import read_data, read_shard
from eagle_export.pipeline.partial import JOURNAL, Partial, partial_folder
from eagle_export.reference.recipe import find_target
from eagle_export.train.samples import load_samples
from eagle_run.errors import EagleError

NESTED = "nested more than 64 deep"


def deep(path: Path) -> Path:
    path.write_text('{"a":' * 20_000 + "1" + "}" * 20_000, encoding="utf-8")
    return path


@pytest.fixture
def model(tiny_target: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ],
)
def test_a_model_folder(model: Path, name: str) -> None:
    deep(model / name)
    with pytest.raises(EagleError, match=rf"{name}: lists or objects {NESTED}"):
        check_folder(model)


def test_an_index_of_shards(model: Path) -> None:
    (model / "model.safetensors").unlink()
    deep(model / "model.safetensors.index.json")
    with pytest.raises(EagleError, match=NESTED):
        model_files(model)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 5000 + b"]" * 5000, NESTED),
        (b"[]", "its header is no object"),
        (b"{", "not readable as JSON"),
    ],
)
def test_a_header_of_safetensors(header: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(EagleError, match=message):
        read_header(file)
    with pytest.raises(EagleError, match=message):
        stored_tensors(file)


@pytest.mark.parametrize("size", [100_000_001, 2**63, 2**64 - 1])
def test_a_header_that_says_it_has_no_end(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(EagleError, match=f"its header has {size:,} bytes"):
        stored_tensors(file)


RECIPES = {
    "lists": "heads: " + "[" * 5000 + "]" * 5000,
    "objects": "heads: " + "{a: " * 5000 + "1" + "}" * 5000,
    "references": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "itself": "a: &a [*a]",
    "size": "description: " + "x" * 2**20,
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPES[kind])
    messages = {
        "references": "more than 10,000,000 values",
        "size": "larger than 1,048,576 bytes",
        "itself": NESTED,
    }
    with pytest.raises(EagleError, match=messages.get(kind, "nested too deep|" + NESTED)):
        find_target(str(file))


READERS: dict[str, Callable[[Path], Any]] = {
    "conversations": lambda folder: read_conversations(deep(folder / "a.jsonl")),
    "scales": lambda folder: Scales.load(deep(folder / "scales.json")),
    "data.json": lambda folder: read_data(deep(folder / "data.json").parent),
    "samples": lambda folder: load_samples([deep(folder / "data.json").parent], vocab_size=10),
    "hf_quant_config.json": lambda folder: fp8_schemes.find(deep(folder / "hf_quant_config.json").parent, {}),
}


@pytest.mark.parametrize("reader", READERS)
def test_other_files(reader: str, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=NESTED):
        READERS[reader](tmp_path)


def test_a_shard_that_says_nonsense_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "00000.safetensors"
    save_file({"tokens": torch.zeros(1)}, file, metadata={"shard": "[" * 5000 + "]" * 5000})
    assert read_shard(file) is None


def test_a_journal_that_says_nonsense_is_started_anew(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    folder = partial_folder(place)
    folder.mkdir(parents=True)
    deep(folder / JOURNAL)
    partial = Partial(place, {"target": "a"})
    partial.enter()
    assert partial.recall("export") is None
