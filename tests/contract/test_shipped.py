"""A bundle is shipped: it tells no folder of the machine that built it, and its weights are found again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.exportcli import Cli, fails, holding
from support.tiny import build_bundle, write_head, write_target

import eagle_export
from eagle_export.pipeline.writer import BundleWriter
from eagle_export.reference.modules import reference_of
from eagle_run.bundle.loading import Bundle, load_bundle

REPOSITORY = Path(eagle_export.__file__).parent.parent
QUICK = ("--limit", "1", "--max-new-tokens", "8", "--threads", "1")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own: what is not in it was never seen on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path, cache: Path) -> tuple[Path, Path]:
    target = write_target(tmp_path / "models" / "my-target")
    return target, write_head(tmp_path / "models" / "my-head", target, draft_vocab=60)


def elsewhere(bundle: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle copied to another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return shutil.copytree(bundle, place / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"link_weights": True}, {"precision": "fp8", "measure": False}], ids=["linked", "fp8"]
)
def test_a_bundle_tells_no_folder_of_its_machine(
    sources: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    out = build_bundle(*sources, tmp_path / "out" / "bundle", **options)
    assert holding(out, tmp_path, tmp_path.name, REPOSITORY, sys.prefix, Path.home(), ".py") == {}
    manifest = load_bundle(out).manifest
    assert manifest.head is not None
    assert (manifest.target.source, manifest.head.source) == ("my-target", "my-head")


def test_weights_are_found_where_they_were_last_seen(
    cli: Cli, sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the build machine without a word; after a move, or elsewhere, once it was said where they are."""
    bundle = build_bundle(*sources, tmp_path / "bundle").rename(tmp_path / "renamed")
    manifest = load_bundle(bundle).manifest
    assert reference_of(manifest).draft is not None
    target, head = (folder.rename(tmp_path / folder.name) for folder in sources)
    fails(cli("verify", bundle, *QUICK), 1, "the target", "not found on this machine: my-target", "--target")
    fails(cli("verify", bundle, "--target", target, *QUICK), 1, "the head", "my-head, sha256", "--head")
    assert cli("verify", bundle, "--target", target, "--head", head, *QUICK).code == 0
    assert reference_of(manifest).draft is not None
    bundle = elsewhere(bundle, tmp_path / "other", monkeypatch)
    fails(cli("verify", bundle, *QUICK), 1, "the target", "not found on this machine")


def test_other_weights_at_the_place_are_noticed(cli: Cli, sources: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = build_bundle(*sources, tmp_path / "bundle")
    write_target(sources[0], seed=5)
    fails(cli("verify", bundle, *QUICK), 1, "another target", str(sources[0]), "--target")


def with_folders(bundle: Path, target: Path, head: Path) -> Bundle:
    """As manifests were: with the folders of the machine that built them."""
    data = json.loads((bundle / "manifest.json").read_text())
    data["target"]["source"], data["head"]["source"] = str(target), str(head)
    (bundle / "manifest.json").write_text(json.dumps(data))
    return load_bundle(bundle)


def test_manifests_that_tell_folders_are_read_and_no_more_written(
    cli: Cli, sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_bundle(*sources, tmp_path / "bundle")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    old = with_folders(bundle, *sources)
    assert reference_of(old.manifest).draft is not None
    with BundleWriter(tmp_path / "new") as writer:
        writer.adopt(old)
        new = writer.finish_like(old.manifest)
    assert holding(new.path, tmp_path) == {}
    assert new.manifest.target.source == "my-target"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty again"))
    old = with_folders(bundle, tmp_path / "gone", tmp_path / "gone too")
    fails(cli("verify", old.path, *QUICK), 1, "the target", f"not found on this machine: {tmp_path / 'gone'}")
