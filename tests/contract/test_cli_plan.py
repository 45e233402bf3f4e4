"""What a build says before it starts: time, disk and memory; and what it refuses or leaves out for them."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path

import pytest
from support.exportcli import Cli, fails, leftovers

import eagle_export.pipeline.estimate
import eagle_export.pipeline.plan
from eagle_export.pipeline.estimate import Memory
from eagle_export.pipeline.options import BuildOptions
from eagle_export.pipeline.partial import JOURNAL, partial_folder
from eagle_export.pipeline.plan import fit, make_plan
from eagle_run.errors import EagleError

SMALL = ("--max-seq-len", "64", "--prefill-chunk", "16", "--max-tree-nodes", "16", "--max-batch", "2")
TREE = ("--tree", "dynamic:2,2,4")


def plan_of(cli: Cli, *arguments: object) -> dict[str, object]:
    outcome = cli("build", *arguments, *SMALL, "--plan", "--json")
    assert outcome.code == 0, outcome
    return json.loads(outcome.out)


def test_a_plan_may_name_a_bundle_that_is_there(
    cli: Cli, built_bundle: Path, tiny_target: Path, tiny_head: Path
) -> None:
    before = leftovers(built_bundle)
    found = plan_of(cli, "--target", tiny_target, "--head", tiny_head, "--out", built_bundle, *TREE)
    assert found["disk_bytes"]
    assert leftovers(built_bundle) == before


def test_a_plan_has_the_steps_that_a_build_would_have(cli: Cli, tiny_target: Path, tmp_path: Path) -> None:
    paths = ("--target", tiny_target, "--head", "none", "--out", tmp_path / "b")
    assert list(plan_of(cli, *paths)["steps"]) == ["export"]
    assert list(plan_of(cli, *paths, "--precision", "fp16")["steps"]) == ["export", "measure"]
    assert list(plan_of(cli, *paths, "--precision", "fp8", "--no-measure")["steps"]) == [
        "calibrate",
        "export",
    ]
    assert leftovers(tmp_path) == []


def test_linked_weights_are_not_planned_for(cli: Cli, tiny_target: Path, tmp_path: Path) -> None:
    paths = ("--target", tiny_target, "--head", "none", "--out", tmp_path / "b")
    written, linked = (plan_of(cli, *paths, *more)["disk_bytes"] for more in ((), ("--link-weights",)))
    stored = (tiny_target / "model.safetensors").stat().st_size
    assert 0.7 * stored < written - linked < stored  # small weights are written all the same


@pytest.mark.parametrize("plan", [["--plan"], []])
def test_what_fp8_would_refuse_is_refused_before_a_calibration(
    plan: list[str], cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(*_: object) -> None:
        raise AssertionError("calibrated")

    monkeypatch.setattr("eagle_export.pipeline.quantization._calibrate", calibrate)
    (tmp_path / "scales.json").write_text('{"format": 1}')
    command = ["build", "--target", tiny_target, "--head", "none", "--precision", "fp8", *SMALL, *plan]
    for more, code, words in (
        (("--keep-16bit", "*.upp_proj"), 2, ("'*.upp_proj'", "model.layers.*.mlp.up_proj")),
        (("--scales", tmp_path / "scales.json"), 1, ("not a file of scales",)),
        (("--scales", tmp_path / "none.json"), 1, ("none.json",)),
    ):
        fails(cli(*command, "--out", tmp_path / "b", *more), code, *words)
    if plan:
        assert cli(*command, "--out", tmp_path / "b", "--keep-16bit", "*.up_proj").code == 0
    assert leftovers(tmp_path) == ["scales.json"]


def planned(target: Path, out: Path, **options: object) -> eagle_export.pipeline.plan.Plan:
    small = {"max_seq_len": 64, "prefill_chunk": 16, "max_tree_nodes": 16, "max_batch": 2}
    return make_plan(BuildOptions(target=str(target), head="none", out=out, **small, **options))  # type: ignore[arg-type]


def test_measuring_is_left_out_where_memory_does_not_allow_it(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tiny_target, tmp_path / "b", precision="fp16")
    steps = eagle_export.pipeline.plan.estimate_plan(plan).steps
    total = steps["measure"].memory_bytes - 1
    for memory, measures in ((total, False), (total + 1, True)):
        monkeypatch.setattr(
            eagle_export.pipeline.estimate, "memory_here", lambda memory=memory: Memory(memory, memory)
        )
        fitted, needed, notes = fit(plan)
        assert fitted.measure is measures
        assert ("measure" in needed.steps) is measures
        assert any("accuracy is not measured" in note for note in notes) is not measures


def test_what_an_interrupted_build_left_counts_as_room(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tiny_target, tmp_path / "b")
    needed = eagle_export.pipeline.plan.estimate_plan(plan).disk_bytes
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 0, needed - 1000))
    with pytest.raises(EagleError, match="are free"):
        fit(plan)
    partial_folder(plan.out).mkdir()
    (partial_folder(plan.out) / JOURNAL).write_bytes(bytes(1000))
    fit(plan)


def test_a_build_says_first_what_it_will_take(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_export.pipeline.build.build_identity", interrupt)
    outcome = cli("build", "--target", tiny_target, "--head", "none", "--out", tmp_path / "b", *SMALL)
    assert outcome.code == 130
    first, second = outcome.err.splitlines()[:2]
    assert "find the weights" in first
    assert "of disk" in second
    assert "of memory and" in second
    assert "on two cores" in second
    assert leftovers(tmp_path) == []


def test_a_place_that_cannot_be_written_is_refused_before_the_weights_are_identified(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing 140 GB takes minutes. A plan writes nothing, and minds neither."""
    (tmp_path / "file").write_text("x")
    command = ["build", "--target", tiny_target, "--head", "none", *SMALL, "--out"]

    def identify(*_: object) -> None:
        raise AssertionError("identified")

    monkeypatch.setattr("eagle_export.pipeline.build.build_identity", identify)
    fails(cli(*command, tmp_path / "file/b"), 1, "file is a file")
    monkeypatch.setattr("os.access", lambda *_: False)
    fails(cli(*command, tmp_path / "new/b"), 1, f"{tmp_path} may not be written")
    assert cli(*command, tmp_path / "new/b", "--plan").code == 0
    assert leftovers(tmp_path) == ["file"]
