from __future__ import annotations

import errno
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.bundlemaker import DRAFT_VOCAB, VOCAB, byte_tokenizer, write_bundle
from support.bundlewriting import fill, names, spec, write

from eagle_export.output_folder import check_links, check_output_folder
from eagle_export.pipeline.writer import BundleWriter
from eagle_run.bundle.loading import load_bundle
from eagle_run.bundle.records import FileEntry
from eagle_run.errors import EagleError, UsageError
from eagle_run.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as far as its tokenizer goes."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 9]}')
    return folder


# --- a bundle is written -------------------------------------------------------------------------------


def test_what_is_written_loads(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "deep/er/b"
    with BundleWriter(out) as writer:
        rest = fill(writer)
        writer.copy_tokenizer(model)
        bundle = writer.finish(**rest)
        assert not writer.folder.exists()
    assert names(out.parent) == ["b"]
    assert load_bundle(out) == bundle
    manifest = bundle.manifest
    assert (manifest.schema_version, manifest.name) == (3, "b")
    assert manifest.tool_version == version("eagle-export")
    assert manifest.created.endswith("+00:00")
    assert [artifact.graph for artifact in manifest.artifacts] == ["target", "fuse", "draft"]
    assert [entry.bytes for entry in manifest.artifacts[0].files] == [6, 1000]
    assert manifest.artifacts[0].spec() == spec("target")
    table = bundle.vocab_map()
    assert table is not None
    assert table.tolist() == list(range(0, 3 * DRAFT_VOCAB, 3))
    assert max(table.tolist()) < VOCAB
    tokenizer = Tokenizer.load(bundle.tokenizer_dir)
    assert tokenizer.eos_token_ids == (256, 9)
    assert tokenizer.chat_template == "{{ messages }}"
    assert names(bundle.tokenizer_dir) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(entry.path for entry in manifest.tokenizer) == [
        f"tokenizer/{name}" for name in names(bundle.tokenizer_dir)
    ]


def test_a_finished_bundle_need_not_be_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "b")
    monkeypatch.setattr("hashlib.file_digest", lambda *args: pytest.fail("hashed again"))
    load_bundle(tmp_path / "b")


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b")
    load_bundle(tmp_path / "b")
    assert names(tmp_path) == ["b"]


# --- what is there already -----------------------------------------------------------------------------


def test_a_bundle_is_kept_unless_forced(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b")
    with pytest.raises(EagleError, match="already holds a bundle; it is kept") as caught:
        write(tmp_path / "b")
    assert caught.value.parameters == ("force",)
    assert (tmp_path / "b/onnx/target.onnx").read_text() == "graph of target"
    write(tmp_path / "b", mark="!", force=True)
    assert (tmp_path / "b/onnx/target.onnx").read_text() == "target!"
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("force", [True, False])
def test_other_folders_and_files_are_never_touched(tmp_path: Path, force: bool) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_text("cat")
    (tmp_path / "file").write_text("x")
    for name, message in (("photos", "not a bundle; it is left alone"), ("file", "is a file")):
        with pytest.raises(EagleError, match=message):
            check_output_folder(tmp_path / name, force=force)
        with pytest.raises(EagleError, match=message):
            write(tmp_path / name, force=force)
    assert (tmp_path / "photos/cat.jpg").read_text() == "cat"
    assert names(tmp_path) == ["file", "photos"]


@pytest.mark.parametrize("place", ["/", "..", "../.."])
def test_places_without_a_name_are_usage_errors(place: str) -> None:
    with pytest.raises(UsageError, match="cannot become a bundle's folder"):
        BundleWriter(place)


def test_a_place_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EagleError, match="cannot be made") as caught:
        write(tmp_path / "file/b")
    assert caught.value.parameters == ("out",)


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    write_bundle(tmp_path / "real")
    (tmp_path / "b").symlink_to(tmp_path / "real")
    write(tmp_path / "b", force=True)
    assert not (tmp_path / "b").is_symlink()
    assert (tmp_path / "real/onnx/target.onnx").read_text() == "graph of target"
    assert names(tmp_path) == ["b", "real"]


def test_a_link_to_nothing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, to in (("b", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / to)
        with pytest.raises(EagleError, match="is a link to nothing"):
            write(tmp_path / name, force=True)
    assert names(tmp_path) == ["b", "loop"]


def test_weights_on_another_disk_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in a cache counts as what it points to. /proc is another disk everywhere; a folder that is bound
    into a container is one too, though its number is the same: only a link can tell."""
    (tmp_path / "here.safetensors").write_bytes(b"x")
    (tmp_path / "cached.safetensors").symlink_to("/proc/version")
    check_links([tmp_path / "here.safetensors"], tmp_path / "new/bundle")
    for file, place in (("here", "/proc/new/bundle"), ("cached", str(tmp_path / "new/bundle"))):
        with pytest.raises(EagleError, match="cannot be linked into") as caught:
            check_links([tmp_path / f"{file}.safetensors"], Path(place))
        assert caught.value.parameters == ("out", "link_weights")

    def bound(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", bound)
    with pytest.raises(EagleError, match="it is on another disk"):
        check_links([tmp_path / "here.safetensors"], tmp_path / "new/bundle")
    assert names(tmp_path) == ["cached.safetensors", "here.safetensors"]


# --- tokenizers ----------------------------------------------------------------------------------------


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "tokenizer.json").write_text("{")
    for folder in (tmp_path / "empty", damaged):
        writer = BundleWriter(tmp_path / "b")
        with pytest.raises(EagleError, match=f"{folder.name}: no readable tokenizer"):
            writer.copy_tokenizer(folder)


def test_a_slow_tokenizer_that_cannot_be_converted_comes_with_the_command(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tokenizer.model").write_text("not one that anything reads")
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with BundleWriter(tmp_path / "b") as writer, pytest.raises(EagleError, match="no readable") as caught:
        writer.copy_tokenizer(slow)
    assert "pip install sentencepiece" in caught.value.hint
    assert "\n" not in caught.value.message


def test_a_tokenizer_that_changes_on_saving_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [1, 2, 3])
    writer = BundleWriter(tmp_path / "b")
    with pytest.raises(EagleError, match=r"the saved tokenizer gives \[1, 2, 3\]"):
        writer.copy_tokenizer(model)


# --- vocabulary map ----------------------------------------------------------------------------------


def test_the_vocabulary_map_is_int64(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        entry = writer.write_vocab_map(torch.tensor([1, 5], dtype=torch.int32))
        assert isinstance(entry, FileEntry)
        assert (writer.folder / entry.path).stat().st_mode & 0o777 == 0o644
        save_file({"draft_to_target": torch.tensor([1, 5])}, tmp_path / "same.safetensors")
        assert (writer.folder / entry.path).read_bytes() == (tmp_path / "same.safetensors").read_bytes()
