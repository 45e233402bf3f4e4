"""The benchmark of big exports, on shapes small enough for a test; and its sparse checkpoints."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import benchmarks
from benchmarks import child
from benchmarks.random_llama import Weight, target_weights
from benchmarks.sparse_checkpoint import SHAPES, write_head, write_target


def values(weights: dict[str, Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights.values())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def test_shapes_have_the_parameters_they_are_called_after() -> None:
    found = {
        name: values(target_weights(shape.target))
        + (0 if shape.tied else shape.target.vocab * shape.target.hidden)
        for name, shape in SHAPES.items()
    }
    assert found["1b"] == 1_235_814_400
    assert found["8b"] == 8_030_261_248
    assert found["70b"] == 70_553_706_496


def test_a_sparse_target_is_a_model_in_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_target(tmp_path / "target", "tiny")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == shards
    assert all((folder / name).stat().st_size < SHAPES["tiny"].shard_bytes + 4096 for name in shards)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) == index["metadata"]["total_size"]
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    assert not model.lm_head.weight.any()


def test_a_sparse_checkpoint_takes_almost_no_disk(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", "70b")
    stats = [path.stat() for path in folder.iterdir()]
    assert sum(stat.st_size for stat in stats) > 141e9
    if sys.platform != "darwin":  # whose file system fills holes
        assert 512 * sum(stat.st_blocks for stat in stats) < 10e6
    assert len(list(folder.glob("*.safetensors"))) == 30


def test_the_head_has_the_public_shape(tmp_path: Path) -> None:
    """An embedding of its own, narrower than the target, read by the head's reader."""
    from eagle_export.reference import recipe as recipes
    from eagle_export.reference.modules import load_config, load_fitting_head

    target, head = write_target(tmp_path / "target", "tiny"), write_head(tmp_path / "head", "tiny")
    found = recipes.resolve_target(str(target))
    spec = load_fitting_head(recipes.resolve_head(str(head), found), load_config(found, 64)).spec
    assert (spec.hidden_size, spec.target_hidden_size, spec.own_embedding) == (48, 64, True)
    big = SHAPES["70b"]
    assert big.head is not None
    assert (big.head.hidden, big.target.hidden, big.head.draft_vocab) == (6144, 8192, 32000)
    tensors = stored(head)
    assert tensors["fc.weight"].shape == (48, 3 * 64)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)


def test_a_child_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    """One within the limit is left alone."""
    (tmp_path / "greedy.py").write_text(
        "import sys, time\nheld = bytearray(int(sys.argv[1]) * 10**6)\n"
        "held[::4096] = bytes(len(held[::4096]))\nprint('held', flush=True)\ntime.sleep(float(sys.argv[2]))\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    small = child.run("greedy", "10", "0", memory_limit=200 * 10**6, environment=environment)
    assert (small.code, small.stopped, small.out) == (0, False, "held\n")
    large = child.run("greedy", "400", "60", memory_limit=200 * 10**6, environment=environment)
    assert large.stopped
    assert large.code != 0
    assert large.peak_memory_bytes > 200 * 10**6


def test_a_child_does_not_inherit_our_peak(tmp_path: Path) -> None:
    """Linux counts a child's memory from before its program is loaded, when it is still ours."""
    (tmp_path / "peak.py").write_text(
        "import time\nfrom eagle_export.progress import peak_memory_bytes\n"
        "held = bytearray(50 * 10**6)\nheld[::4096] = bytes(len(held[::4096]))\n"
        "print(peak_memory_bytes())\ntime.sleep(0.5)\n"
    )
    ours = bytearray(600 * 10**6)
    ours[::4096] = bytes(len(ours[::4096]))
    small = child.run("peak", environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    assert small.code == 0, small.errors
    assert 50 * 10**6 < small.peak_memory_bytes < 300 * 10**6
    assert 50 * 10**6 < int(small.out) < 300 * 10**6


def test_memory_of_what_a_child_started_counts(tmp_path: Path) -> None:
    """However much we hold: a compiler's process can take more than the command that started it."""
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys\n"
        "held = 'held = bytearray(150 * 10**6); held[::4096] = bytes(len(held[::4096]))'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', held]).returncode + 3)\n"
    )
    ours = bytearray(600 * 10**6)
    ours[::4096] = bytes(len(ours[::4096]))
    ended = child.run("starts", environment={"PYTHONPATH": str(tmp_path)})
    assert (ended.code, ended.stopped) == (3, False)
    assert 150 * 10**6 < ended.peak_memory_bytes < 250 * 10**6
    assert 0 < ended.cpu_seconds < 60


def test_the_whole_benchmark_on_a_tiny_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import export_scale
    from eagle_export.pipeline.estimate import estimate
    from eagle_export.pipeline.sizes import weigh_checkpoints

    folders = write_target(tmp_path / "t", "tiny"), write_head(tmp_path / "h", "tiny")
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    arguments = ["--shapes", "tiny", "--json", str(out), "--work", str(work)]
    export_scale.main(arguments, standalone_mode=False)
    found = json.loads((out / "export_scale.json").read_text())["shapes"]["tiny"]
    expected = estimate(weigh_checkpoints(*folders, "bf16", base="bf16"), "bf16").memory_bytes
    for way in ("linked", "written"):  # what a process takes without weights
        assert 0.67 * found[way]["peak_memory_bytes"] < expected < 1.5 * found[way]["peak_memory_bytes"]
    for way in ("linked", "written", "torch"):
        assert found[way]["peak_memory_bytes"] > 10**8
        assert found[way]["seconds"] > 1
    assert "export target" in found["linked"]["steps"]
    assert found["linked"]["written_bytes"] < found["written"]["written_bytes"]
    assert found["torch"]["written_bytes"] > found["target_bytes"]
    assert list(work.iterdir()) == []
    monkeypatch.setattr(export_scale, "measure", lambda *_: pytest.fail("measured again"))
    export_scale.main(arguments, standalone_mode=False)
    assert "already in" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["1b", "8b", "70b"])
def test_estimates_follow_what_was_measured(shape: str, tmp_path: Path) -> None:
    """Memory and seconds of every export in benchmarks/results, within a factor of 1.5."""
    from benchmarks.export_scale import FILE
    from eagle_export.pipeline.estimate import estimate
    from eagle_export.pipeline.sizes import weigh_checkpoints

    results = json.loads((Path(benchmarks.__file__).parent / "results" / FILE).read_text())["shapes"][shape]
    folders = write_target(tmp_path / "t", shape), write_head(tmp_path / "h", shape)
    weighed = weigh_checkpoints(*folders, "bf16", base="bf16")
    measured = [way for way in ("linked", "written") if "steps" in results.get(way, {})]  # others did not fit
    assert "linked" in measured
    for way in measured:
        expected, found = estimate(weighed, "bf16", links=way == "linked"), results[way]
        memory = expected.memory_bytes / found["peak_memory_bytes"]
        seconds = expected.seconds / found["seconds"]
        assert 1 / 1.5 < memory < 1.5, way
        assert 1 / 1.5 < seconds < 1.5, way


def test_what_does_not_fit_is_said_with_its_figures() -> None:
    from benchmarks.export_scale import _result

    killed = child.Ended(-9, "", "", 12.34, 3.21, 9 * 10**9, stopped=True)
    found = _result(killed, 8 * 10**9, Path())
    assert found == {
        "refused": "more than 8.0 GB of memory are needed",
        "seconds": 12.3,
        "cpu_seconds": 3.2,
        "peak_memory_bytes": 9 * 10**9,
    }
    said = "error: /tmp/x/bundle: about 282 GB are needed, 50 GB are free\nhint: free some"
    full = child.Ended(1, "", said, 4.0, 3.0, 10**8, stopped=False)
    assert _result(full, 8 * 10**9, Path())["refused"] == "about 282 GB are needed, 50 GB are free"


def test_the_table_has_a_row_for_each_export() -> None:
    from benchmarks.scale_tables import scale_table

    done: dict[str, Any] = {"seconds": 61.0, "peak_memory_bytes": 4.2 * 10**9, "written_bytes": 10**7}
    shape = {"target_bytes": 141 * 10**9, "linked": done, "torch": {"refused": "more than 20 GB are needed"}}
    environment = {"cores": 2, "cpu": "a processor", "memory_bytes": 25 * 10**9, "torch": "2.13"}
    table = scale_table({"shapes": {"70b": shape}, "environment": environment})
    assert "| Llama-3.3-70B, 141.0 GB | `eagle-export build --link-weights` | 61 | 4.2 | 0.01 |" in table
    assert "does not fit: more than 20 GB are needed" in table
    assert "2 cores of a processor" in table
