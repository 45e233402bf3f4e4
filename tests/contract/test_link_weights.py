"""`--link-weights`: weights stay in the checkpoint's files, and everything else is as without it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import onnx
import pytest
from safetensors.torch import load_file, save_file
from support.decoding import Request, run
from support.exportcli import Cli
from support.tiny import build_bundle, write_head, write_target

from eagle_export.graphs import links
from eagle_export.pipeline.options import Fp8Options
from eagle_run.bundle.loading import load_bundle
from eagle_run.engine.engine import Engine
from eagle_run.engine.graph_loading import load_graphs
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.validation import EngineLimits
from eagle_run.errors import EagleError


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target in two files, and its head; all on the disk of the bundles."""
    root = tmp_path_factory.mktemp("linked")
    target = write_target(root / "target")
    head = write_head(root / "head", target, draft_vocab=60)
    split(target)
    return target, head


def split(target: Path) -> None:
    """One file of weights becomes two, with an index."""
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, target / file, metadata={"format": "pt"})
    where = {name: file for file, some in files.items() for name in some}
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def linked(sources: tuple[Path, Path]) -> Path:
    return build_bundle(*sources, sources[0].parent / "bundles" / "linked", link_weights=True)


@pytest.fixture(scope="module")
def copied(sources: tuple[Path, Path]) -> Path:
    return build_bundle(*sources, sources[0].parent / "bundles" / "copied")


def places(bundle: Path, graph: str) -> dict[str, str]:
    """The file of each initializer of a graph that has its data outside."""
    model = onnx.load(bundle / "onnx" / f"{graph}.onnx", load_external_data=False)
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}["location"]
        for tensor in model.graph.initializer
        if tensor.external_data
    }


def answer(bundle: Path) -> tuple[int, ...]:
    loaded = load_bundle(bundle)
    limits, tree = loaded.manifest.limits, loaded.manifest.tree
    assert tree is not None
    runner = ModelRunner(load_graphs(loaded).graphs, batch=1, draft_to_target=loaded.vocab_map())
    engine = Engine(runner, EngineLimits(limits.max_seq_len, limits.prefill_chunk))
    request = Request(tuple(range(5, 15)), max_new_tokens=60)
    return run(engine, [request], tree.shape()).token_ids[0]


def test_large_weights_are_read_where_they_are(linked: Path, sources: tuple[Path, Path]) -> None:
    for graph in ("target", "draft", "fuse"):
        for name, file in places(linked, graph).items():
            small = "norm" in name or "+" in name  # below a page; k and v of the target are joined as ever
            assert small == (file == f"{graph}.onnx.data"), name
            assert small or not name.endswith(".T"), name
    files = {file for graph in ("target", "draft", "fuse") for file in places(linked, graph).values()}
    assert {name for name in files if name.startswith(("target-", "head-"))} == {
        "target-model-00001-of-00002.safetensors",
        "target-model-00002-of-00002.safetensors",
        "head-model.safetensors",
    }
    target, head = sources
    assert (linked / "onnx/head-model.safetensors").samefile(head / "model.safetensors")
    name = "model-00001-of-00002.safetensors"
    assert (linked / f"onnx/target-{name}").samefile(target / name)
    assert places(linked, "draft")["embed_tokens.weight"].startswith("target-")  # the head has none


def test_tokens_are_those_of_copied_weights(linked: Path, copied: Path) -> None:
    assert answer(linked) == answer(copied)


def test_the_manifest_says_what_is_linked(cli: Cli, linked: Path, copied: Path) -> None:
    entries = load_bundle(linked).manifest.files()
    origins = {entry.path: entry.origin for entry in entries if entry.origin is not None}
    assert origins == {
        "onnx/target-model-00001-of-00002.safetensors": "target/model-00001-of-00002.safetensors",
        "onnx/target-model-00002-of-00002.safetensors": "target/model-00002-of-00002.safetensors",
        "onnx/head-model.safetensors": "head/model.safetensors",
    }
    assert all(entry.origin is None for entry in load_bundle(copied).manifest.files())
    outcome = cli("inspect", linked)
    assert "links to the checkpoint's own files" in outcome.out
    shown = json.loads(cli("inspect", linked, "--json").out)
    assert shown["linked_bytes"] == sum((linked / path).stat().st_size for path in origins)
    assert "links" not in cli("inspect", copied).out


def test_a_copy_is_a_whole_bundle(linked: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(linked, tmp_path / "copy")
    assert (copy / "onnx/head-model.safetensors").stat().st_nlink == 1
    onnx.checker.check_model(str(copy / "onnx/target.onnx"), full_check=True)
    assert answer(copy) == answer(linked)


def test_a_checkpoint_that_is_written_over_is_noticed(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    bundle = build_bundle(target, "none", tmp_path / "b", link_weights=True)
    file = target / "model.safetensors"
    before = file.read_bytes()
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(b"\x00\x00\x80\x3e")
    with pytest.raises(EagleError, match=r"target-model\.safetensors: edited or corrupt") as caught:
        load_bundle(bundle)
    assert "link to target/model.safetensors of the checkpoint" in caught.value.hint
    with file.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(EagleError, match=r"expected \d+ bytes, found 100"):
        load_bundle(bundle)
    file.write_bytes(before)  # over the same file
    load_bundle(bundle)
    file.unlink()  # a link outlives its other name
    load_bundle(bundle)
    (bundle / "onnx/target-model.safetensors").unlink()
    with pytest.raises(EagleError, match=r"missing, but the manifest lists it") as caught:
        load_bundle(bundle)
    assert "link to target/model.safetensors" in caught.value.hint


def test_another_type_is_written(cli: Cli, sources: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, (target, head) = tmp_path / "half", sources
    given = ("--target", target, "--head", head, "--max-seq-len", "64", "--prefill-chunk", "16")
    outcome = cli("build", *given, "--precision", "fp16", "--no-measure", "--link-weights", "--out", bundle)
    assert outcome.code == 0, outcome.err
    assert "nothing is linked: the checkpoint holds no large weight in fp16" in outcome.err
    assert sorted(path.name for path in (bundle / "onnx").iterdir()) == [
        f"{graph}.onnx{end}" for graph in ("draft", "fuse", "target") for end in ("", ".data")
    ]


@pytest.mark.slow
def test_quantised_products_are_written_and_the_rest_is_linked(sources: tuple[Path, Path]) -> None:
    half = sources[0].with_name("half-target")
    shutil.copytree(sources[0], half)
    for file in half.glob("*.safetensors"):
        save_file(
            {name: tensor.half() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"}
        )
    bundles = half.parent / "bundles"
    plain = build_bundle(half, "none", bundles / "fp8", precision="fp8", measure=False)
    again = Fp8Options(scales=plain / "fp8_scales.json")
    bundle = build_bundle(
        half, "none", bundles / "fp8-linked", precision="fp8", measure=False, fp8=again, link_weights=True
    )
    found = places(bundle, "target")
    assert {name for name, file in found.items() if file != "target.onnx.data"} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    names = {name for name in places(plain, "target") if name.endswith(".fp8")}
    assert names == {name for name in found if name.endswith(".fp8")}
    read = [
        {tensor.name: tensor.raw_data for tensor in onnx.load(copy / "onnx/target.onnx").graph.initializer}
        for copy in (plain, shutil.copytree(bundle, bundles / "fp8-copy"))
    ]
    assert all(read[0][name] == read[1][name] for name in names)


def test_verify_reads_linked_weights(cli: Cli, linked: Path, sources: tuple[Path, Path]) -> None:
    outcome = cli("verify", linked, "--target", sources[0], "--head", sources[1], "--limit", "2")
    assert outcome.code == 0, outcome.out


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EXDEV, "it is on another disk"), (errno.EPERM, "Operation not permitted")]
)
def test_a_disk_without_links_is_an_error(
    sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(links.os, "link", refuse)
    with pytest.raises(EagleError, match=f"cannot be linked into .*: {words}") as caught:
        build_bundle(sources[0], "none", tmp_path / "b", link_weights=True)
    assert caught.value.parameters == ("out", "link_weights")
    assert not list(tmp_path.iterdir())


def test_export_links_too(cli: Cli, sources: tuple[Path, Path]) -> None:
    out = sources[0].parent / "graphs"
    outcome = cli("export", "--target", sources[0], "--head", "none", "--max-seq-len", "64", "--link-weights",
                  "--prefill-chunk", "16", "--out", out)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert (out / "target-model-00001-of-00002.safetensors").stat().st_nlink > 1
