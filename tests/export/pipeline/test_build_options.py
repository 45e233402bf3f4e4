"""How options join with a recipe's defaults, and what progress says."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_export.checkpoints import weights
from eagle_export.pipeline.facts import library_versions
from eagle_export.pipeline.options import (
    PROFILES,
    BuildOptions,
    EngineOptions,
    cache_rows_for,
    choose_limits,
    choose_tree,
)
from eagle_export.pipeline.plan import make_plan
from eagle_export.progress import Progress, peak_memory_bytes
from eagle_export.reference.recipe import BuildLimits
from eagle_run.bundle.manifest import TreeDefaults
from eagle_run.errors import UsageError

LIMITS = BuildLimits(max_seq_len=1000, max_batch=4, prefill_chunk=128, max_tree_nodes=64)
DYNAMIC = TreeDefaults(kind="dynamic", depth=3, top_k=4, nodes=16)
STATIC = TreeDefaults(kind="static", depth=2, top_k=2, nodes=4, parents=(-1, 0, 0, 1))


def options(**given: object) -> BuildOptions:
    return BuildOptions(target="x", **given)  # type: ignore[arg-type]


def test_what_is_not_given_comes_from_the_recipe() -> None:
    assert choose_limits(options(), LIMITS) == LIMITS
    assert choose_tree(options(), DYNAMIC, 64) == DYNAMIC
    assert choose_tree(options(), STATIC, 64) == STATIC
    given = choose_limits(options(max_seq_len=100, max_batch=1), LIMITS)
    assert (given.max_seq_len, given.max_batch, given.max_tree_nodes) == (100, 1, 64)
    assert given.prefill_chunk == 100  # no chunk can be longer than the context


def test_a_part_of_a_tree_can_be_given() -> None:
    assert choose_tree(options(nodes=8), DYNAMIC, 64) == DYNAMIC.model_copy(update={"nodes": 8})
    chain = choose_tree(options(tree="chain", depth=5), DYNAMIC, 64)
    assert (chain.kind, chain.depth, chain.top_k, chain.nodes) == ("chain", 5, 1, 6)
    static = choose_tree(options(tree="static", depth=3, top_k=2, nodes=6), DYNAMIC, 64)
    assert static.kind == "static"
    assert static.parents is not None
    assert len(static.parents) == 6
    with pytest.raises(UsageError, match="64"):
        choose_tree(options(depth=9, top_k=10, nodes=65), DYNAMIC, 64)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("chain:3", ("chain", 3, 1, 4)),
        ("dynamic:2,3,6", ("dynamic", 2, 3, 6)),
        ("static:0,0,1", ("static", 2, 2, 4)),
    ],
)
def test_a_spec_says_all_of_a_tree(spec: str, expected: tuple[str, int, int, int]) -> None:
    """The syntax of eagle-run; nothing of the recipe's tree is left."""
    tree = choose_tree(options(tree=spec), DYNAMIC, 64)
    assert (tree.kind, tree.depth, tree.top_k, tree.nodes) == expected
    with pytest.raises(UsageError, match="is complete; it takes no depth beside it"):
        choose_tree(options(tree=spec, depth=2), DYNAMIC, 64)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("oak", "neither a tree nor a file"), ("plain", "needs none"), ("chain:70", "71 nodes")],
)
def test_a_spec_that_is_no_bundles_tree(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_tree(options(tree=spec), DYNAMIC, 64)


def test_the_recipe_s_tree_shrinks_to_the_limit_and_a_given_one_does_not() -> None:
    assert choose_tree(options(), DYNAMIC, 5) == DYNAMIC.model_copy(update={"nodes": 5})
    with pytest.raises(UsageError, match="16 nodes"):
        choose_tree(options(nodes=16), DYNAMIC, 5)
    with pytest.raises(UsageError, match="4 nodes"):
        choose_tree(options(), STATIC, 3)


@pytest.mark.parametrize("tree", [None, DYNAMIC, TreeDefaults(kind="dynamic", depth=9, top_k=10, nodes=60)])
@pytest.mark.parametrize("chunk", [1, 128, 512])
def test_the_cache_has_room_behind_the_longest_sequence(tree: TreeDefaults | None, chunk: int) -> None:
    limits = LIMITS.model_copy(update={"prefill_chunk": chunk})
    rows = cache_rows_for(limits, tree)
    drafted = 0 if tree is None else (tree.depth - 1) * tree.top_k  # rows of the draft's own tree
    assert rows >= 1000 + max(chunk, 64, drafted)
    assert rows < 1000 + max(chunk, 64, drafted) + 64
    assert rows % 64 == 0


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        ({"top_k": 2}, {"top_k", "head"}),
        ({"tree": "chain", "depth": 3}, {"tree", "depth", "head"}),
        ({"head_layer_ids": (1,)}, {"head_layer_ids", "head_set", "head"}),
    ],
)
def test_options_of_a_draft_need_a_head(given: dict[str, object], parameters: set[str]) -> None:
    options(**given).check()
    with pytest.raises(UsageError) as caught:
        options(head="none", **given).check()
    assert set(caught.value.parameters) == parameters


def test_contradictions_are_found_before_any_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> None:
        raise AssertionError("weights were fetched")

    for name in ("fetch", "convert_gguf", "folder_identity"):
        monkeypatch.setattr(weights, name, fetch)
    for target, head, tree in (
        ("smollm2-135m", "eagle3", {"depth": 9, "top_k": 10, "nodes": 65}),
        ("org/model", "org/head", {"depth": 1, "top_k": 2, "nodes": 9}),
        ("org/model", "eagle3", {}),  # a recipe names heads; this target has none
        ("smollm2-135m", "eagle4", {}),
    ):
        asked = BuildOptions(target=target, head=head, out=tmp_path / "b", **tree)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            make_plan(asked)
    with pytest.raises(AssertionError, match="were fetched"):
        make_plan(BuildOptions(target="org/model", head="org/head", out=tmp_path / "b"))


def test_versions_skip_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-gpu takes the place of onnxruntime."""

    def version(name: str) -> str:
        if name == "onnxruntime":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = library_versions()
    assert "onnxruntime" not in found
    assert found["onnxruntime-gpu"] == "1.0"


def test_an_engine_takes_no_option_of_another_backend() -> None:
    rtx = EngineOptions(backend="tensorrt-rtx")
    rtx.check("fp16")
    EngineOptions().check("fp8")
    for given in ({"version_compatible": True}, {"timing_cache": Path("t")}):
        with pytest.raises(UsageError, match="for TensorRT;"):
            replace(rtx, **given).check("fp16")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is for engines"):
            EngineOptions(**given).check("fp16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="backend should be"):
        EngineOptions(backend="coreml").check("fp16")


def test_options_and_engines_mean_the_same_profiles() -> None:
    from eagle_export.engines.profiles import PROFILE_NAMES

    assert PROFILES == PROFILE_NAMES


def test_a_report_tells_each_step_once_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.step("first thing"):
        pass
    with pytest.raises(RuntimeError), progress.step("broken thing"):
        raise RuntimeError
    assert list(progress.track([1, 2], "things")) == [1, 2]
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["first thing", "things"]
    assert set(progress.seconds) == {"first thing", "things"}
    assert progress.total_seconds() >= sum(progress.seconds.values())


def test_a_quiet_report_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=True)
    with progress.step("a"):
        progress.note("b")
    assert list(progress.track([1], "c")) == [1]
    assert capsys.readouterr() == ("", "")
    assert progress.seconds.keys() == {"a", "c"}


def test_peak_memory_is_in_bytes() -> None:
    assert 10**8 < peak_memory_bytes() < 10**12  # a process with torch in it
