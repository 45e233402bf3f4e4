from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.bundlemaker import ACCURACY, QUANTIZATION, add_engines, engine, write_bundle

from eagle_run.bundle import manifest, records
from eagle_run.bundle.loading import load_bundle
from eagle_run.bundle.manifest import TreeDefaults, graph_tensor_names
from eagle_run.bundle.records import AxisRange
from eagle_run.bundle.tensors import TensorSpec
from eagle_run.dtypes import DTYPES, GRAPH_DTYPES
from eagle_run.errors import EagleError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_graph_tensor_names_follow_the_contract() -> None:
    inputs, outputs = graph_tensor_names("target", 1)
    common = ("position_ids", "tree_mask", "write_index", "logits_index", "past_key.0", "past_value.0")
    assert inputs == ("input_ids", *common)
    assert outputs == ("logits", "features", "present_key.0", "present_value.0")
    assert graph_tensor_names("fuse", 7) == (("features",), ("hidden",))
    inputs, outputs = graph_tensor_names("draft", 1)
    assert inputs == ("input_ids", "hidden", *common)
    assert outputs == ("logits", "hidden_out", "present_key.0", "present_value.0")


# --- what a manifest may not say ------------------------------------------------------------------------


def set_at(path: str, value: Any) -> Any:
    def edit(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = data
        for key in parents:
            place = place[int(key)] if key.isdigit() else place[key]
        place[int(last) if last.isdigit() else last] = value

    return edit


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("artefacts", "did you mean 'artifacts'?"),
        ("target.layer", "did you mean 'layers'?"),
        ("head.feature_layer", "did you mean 'feature_layers'?"),
        ("artifacts.1.precison", "did you mean 'precision'?"),
        ("artifacts.1.files.0.sha", "did you mean 'sha256'?"),
        ("limits.zzz", "known keys: max_seq_len"),
    ],
)
def test_unknown_keys_are_errors_with_a_suggestion(tmp_path: Path, path: str, hint: str) -> None:
    root = write_bundle(tmp_path / "b", set_at(path, 1))
    with pytest.raises(EagleError, match=re.escape(f"manifest.json: unknown key '{path}'")) as caught:
        load_bundle(root)
    assert hint in caught.value.hint


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", lambda data: data["limits"].pop("cache_rows"))
    with pytest.raises(EagleError, match=r"missing key 'limits\.cache_rows'"):
        load_bundle(root)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("limits.max_batch", "2", "valid integer.*found '2'"),
        ("limits.max_batch", 0, "greater than or equal to 1.*found 0"),
        ("target.sha256", "abc", "match pattern.*found 'abc'"),
        ("head.algorithm", "eagle9", "'eagle1' or 'eagle3'.*found 'eagle9'"),
        ("limits.max_seq_len", 97, "97 and 16 rows behind it .* need 113 rows, but cache_rows is 96"),
        ("limits.max_seq_len", 81, "need 97 rows, but cache_rows is 96"),
        ("limits.prefill_chunk", 33, "64 and 33 rows behind it .* need 97 rows, but cache_rows is 96"),
        ("limits.draft_cache_rows", 79, "need 80 rows, but draft_cache_rows is 79"),
        ("artifacts.0.inputs.0.dtype", "float8_e4m3fn", "found 'float8_e4m3fn'"),
        ("stop_token_ids", [64], "pass the vocabulary of 64"),
        ("tree", None, "head and tree must both be present"),
        ("head", None, "head and tree must both be present"),
        ("limits.max_tree_nodes", 3, "4 nodes passes max_tree_nodes 3"),
        ("head.feature_layers", [1, 0], "must ascend within 0..3"),
        ("head.feature_layers", [0, 4], "must ascend within 0..3"),
        ("head.feature_layers", [], "must ascend within 0..3"),
        ("head.vocab_map", None, "draft vocabulary 16 of 64 needs a vocab_map"),
        ("artifacts.0.file", "onnx/other.onnx", "is not among its files"),
        ("artifacts.0.inputs.0.name", "ids", "inputs of the target graph differ"),
        ("artifacts.2.outputs.1.name", "hidden", "outputs of the draft graph differ"),
        ("artifacts.0.files.0.path", "../other", "must be relative and stay inside"),
        ("artifacts.0.files.0.path", "/etc/passwd", "must be relative and stay inside"),
        ("artifacts.0.files.0.path", "a/../../b", "must be relative and stay inside"),
        ("artifacts.0.files.0.path", "..\\b", "must be relative and stay inside"),
        ("artifacts.0.files.0.path", "C:/b", "must be relative and stay inside"),
        ("tree.nodes", 8, "need 7 candidates"),
        ("tree.depth", 0, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_true_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    root = write_bundle(tmp_path / "b", set_at(path, value))
    with pytest.raises(EagleError, match=message):
        load_bundle(root)


def test_the_rows_of_the_tree_count_as_well(tmp_path: Path) -> None:
    wide = {"kind": "dynamic", "depth": 9, "top_k": 4, "nodes": 4, "parents": None}  # 32 rows of the draft

    def edit(data: dict[str, Any]) -> None:
        data["tree"] = wide
        data["limits"]["max_seq_len"] = most

    most = 64
    load_bundle(write_bundle(tmp_path / "fits", edit))
    most = 65
    with pytest.raises(EagleError, match=r"65 and 32 rows behind it .* need 97 rows, but cache_rows is 96"):
        load_bundle(write_bundle(tmp_path / "b", edit))


def test_every_dtype_of_a_manifest_is_one_that_the_runtime_binds() -> None:
    for name, dtype in DTYPES.items():
        if name in GRAPH_DTYPES:
            assert str(dtype.torch) == f"torch.{TensorSpec(name, name, ()).dtype}"
        else:
            with pytest.raises(ValueError, match="should be one of float32, "):
                TensorSpec(name, name, ())


def test_a_draft_without_a_head_is_refused(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", lambda data: data.update(head=None, tree=None))
    with pytest.raises(EagleError, match="a fuse graph without a head"):
        load_bundle(root)


def test_the_head_of_another_target_is_refused(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", set_at("head.target_sha256", "c" * 64))
    with pytest.raises(EagleError, match="another target: expected sha256 cccccccccccc…, found aaaa"):
        load_bundle(root)


# --- engines --------------------------------------------------------------------------------------------


def engine_bundle(root: Path, **changes: Any) -> Path:
    return write_bundle(root, lambda data: add_engines(data, root, ("8.9", "12.0"), **changes))


def test_engines_accuracy_and_quantization_are_read(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        add_engines(data, root, ("8.9",))
        data.update(accuracy=ACCURACY, quantization=QUANTIZATION)

    root = tmp_path / "b"
    read = load_bundle(write_bundle(root, edit)).manifest
    info = read.artifacts[-1].engine
    assert info is not None
    assert [profile.name for profile in info.profiles] == ["verify", "plain"]
    assert info.profiles[0].axes["T"] == AxisRange(min=1, opt=16, max=64)
    assert info.profiles[0].layers is not None
    assert info.profiles[0].layers.gemms == {"fp8": 8, "fp16": 1}
    assert info.profiles[1].layers is None
    assert read.accuracy is not None
    assert read.accuracy.model_dump() == ACCURACY
    assert read.quantization is not None
    assert read.quantization.kept == ("lm_head",)
    assert manifest.Manifest.model_validate_json(read.model_dump_json()) == read


def test_engines_are_of_compilers_and_of_them_alone(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="target graph for tensorrt: engine is null for onnx, and only"):
        load_bundle(engine_bundle(tmp_path / "none", engine=None))
    root = write_bundle(tmp_path / "onnx", set_at("artifacts.0.engine", engine()))
    with pytest.raises(EagleError, match="target graph for onnx: engine is null for onnx, and only"):
        load_bundle(root)


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        (["8.9", "8.9"], "must ascend"),
        (["12.0", "8.9"], "must ascend"),  # by number, not by text
        (["sm89"], "match pattern"),
        (["8.9a"], "match pattern"),
        (["89"], "match pattern"),
        (8.9, "valid"),
    ],
)
def test_gpus_are_named_by_their_compute_capability(
    tmp_path: Path, capabilities: object, message: str
) -> None:
    with pytest.raises(EagleError, match=message):
        load_bundle(engine_bundle(tmp_path / "b", compute_capabilities=capabilities))


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 4, 3), (4, 4, 3), (0, 1, 2), (1, 1, 1.5)])
def test_the_sizes_of_an_axis_ascend(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must ascend|greater than or equal to 1|valid integer"):
        AxisRange(min=sizes[0], opt=sizes[1], max=sizes[2])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("profiles", [], "at least 1"),
        ("profiles.1.name", "verify", "two profiles have one name"),
        ("profiles.1.axes", {}, "profile 'plain' must give exactly .* B, T; it differs in B, T"),
        (
            "profiles.0.axes.KV",
            {"min": 1, "opt": 1, "max": 1},
            "profile 'verify' must give exactly .* B, T; it differs in KV",
        ),
        ("profiles.0.axes.T.max", 15, "sizes must ascend, found 1, 16, 15"),
        ("profiles.0.axes.X", {"min": 1, "opt": 1, "max": 1}, "'B', 'T', 'R' or 'KV'"),
        ("profiles.0.layers.gemms.fp8", 0, "greater than or equal to 1"),
        ("seconds", -1, "greater than or equal to 0"),
        ("kernels", 3, "unknown key 'artifacts.3.engine.kernels'"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    def edit(data: dict[str, Any]) -> None:
        add_engines(data, root, ("8.9",))
        set_at(f"artifacts.3.engine.{path}", value)(data)

    root = tmp_path / "b"
    write_bundle(root, edit)
    with pytest.raises(EagleError, match=message):
        load_bundle(root)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("accuracy.top1_agreement", 1.01, "less than or equal to 1"),
        ("accuracy.tokens", 0, "greater than or equal to 1"),
        ("accuracy.kl", -0.1, "greater than or equal to 0"),
        ("accuracy.perplexity", 0.9, "greater than or equal to 1"),
        ("quantization.source", "guessed", "'modelopt', 'compressed-tensors' or 'fp8'"),
        ("quantization.base", "fp8", "'fp16', 'bf16' or 'fp32'"),
    ],
)
def test_impossible_measurements_are_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    def edit(data: dict[str, Any]) -> None:
        data.update(accuracy=dict(ACCURACY), quantization=dict(QUANTIZATION))
        set_at(path, value)(data)

    with pytest.raises(EagleError, match=message):
        load_bundle(write_bundle(tmp_path / "b", edit))


TREE = {"kind": "dynamic", "depth": 2, "top_k": 2, "nodes": 4}


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"nodes": 7},  # all 2 + 4 candidates and the root
        {"kind": "chain", "depth": 3, "top_k": 1},
        {"kind": "static", "parents": (-1, 0, 0, 1)},
    ],
)
def test_trees_that_make_sense(tree: dict[str, Any]) -> None:
    assert TreeDefaults(**(TREE | tree)).nodes >= 4


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"depth": 1}, "need 3 candidates, but depth 1 and top_k 2 give 2"),
        ({"nodes": 1}, "greater than or equal to 2"),
        ({"top_k": 0}, "greater than or equal to 1"),
        ({"parents": (-1, 0, 0, 1)}, "dynamic tree must not have parents"),
        ({"kind": "static"}, "static tree must have parents"),
        ({"kind": "chain", "top_k": 1}, "chain of depth 2 has top_k 1 and 3 nodes"),
        ({"kind": "chain", "depth": 3, "top_k": 2}, "chain of depth 3 has top_k 1 and 4 nodes"),
        ({"kind": "static", "parents": (-1, 0, 0)}, "must hold 4 entries"),
        ({"kind": "static", "parents": (0, 0, 0, 1)}, "the first -1"),
        ({"kind": "static", "parents": (-1, 0, 3, 1)}, "parent of node 2 is 3"),
        ({"kind": "static", "parents": (-1, -1, 0, 1)}, "parent of node 1 is -1"),
        ({"kind": "static", "parents": (-1, 0, 1, 2)}, "describe depth 3"),
        ({"kind": "static", "parents": (-1, 0, 0, 0)}, "up to 3 children"),
    ],
)
def test_trees_that_make_no_sense(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeDefaults(**(TREE | tree))


def test_the_format_page_lists_exactly_the_fields_of_the_schema() -> None:
    """docs/format.md has one table per record; its first column is the record's fields, in order."""
    text = (Path(__file__).parents[3] / "docs/format.md").read_text(encoding="utf-8")
    tables = {
        name: re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE)
        for name, body in re.findall(r"^#+ `(\w+)`\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    }
    known = {
        name: list(record.model_fields)
        for name, record in (vars(records) | vars(manifest)).items()
        if isinstance(record, type) and issubclass(record, records.Record) and record is not records.Record
    }
    known["TensorSpec"] = [field.name for field in fields(TensorSpec)]
    assert tables == known
    assert f"schema version {manifest.SCHEMA_VERSION}" in text
