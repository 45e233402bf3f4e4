"""Profiles against the runtime itself: whatever it binds within a bundle's limits must fit one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from support.decoding import Request, answers_of
from support.tiny import eager_engine, modules_of

from eagle_export.engines.profiles import PROFILE_NAMES, choose_profiles
from eagle_export.pipeline.options import EngineOptions
from eagle_export.reference.modules import Modules
from eagle_run.backends.base import Graph, Run
from eagle_run.backends.padding import padded_graph
from eagle_run.backends.profiles import fits, tensor_range
from eagle_run.bundle.manifest import Limits, TreeDefaults
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.engine.engine import Engine
from eagle_run.errors import UsageError
from eagle_run.tuning.forward_time import forward_seconds, fuse_seconds

ROWS = 192
LIMITS = Limits(
    max_seq_len=128, max_batch=3, prefill_chunk=24, max_tree_nodes=32, cache_rows=ROWS, draft_cache_rows=ROWS
)
TREE = TreeDefaults(kind="dynamic", depth=3, top_k=3, nodes=10)
LENGTHS = (1, 2, 18, 40, 100, 122)
TREES = (
    TREE.shape(),
    TreeShape.plain(),
    TreeShape.chain(1),
    TreeShape.chain(31),
    TreeShape.dynamic(2, 31, 32),
    TreeShape.dynamic(6, 8, 32),
    best_static(4, 4, 32),
    TreeShape.static((-1, *(0,) * 15, *range(1, 16))),
)
SUBSETS = ((), ("prefill",), ("verify",), ("verify", "plain"), ("prefill", "plain"), ("draft", "prefill"))


class Recorder:
    """A graph that notes the sizes of B, T, R and KV that it is bound with."""

    def __init__(self, graph: Graph, seen: set[tuple[tuple[str, int], ...]]) -> None:
        self._graph = graph
        self._seen = seen

    @property
    def spec(self) -> GraphSpec:
        return self._graph.spec

    @property
    def capturable(self) -> bool:
        return self._graph.capturable

    def bind(self, tensors: Mapping[str, torch.Tensor], *, shared: bool = False) -> Run:
        sizes: dict[str, int] = {}
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            for axis, size in zip(tensor.shape, tensors[tensor.name].shape, strict=True):
                if isinstance(axis, str):
                    sizes[axis] = size
        self._seen.add(tuple(sorted(sizes.items())))
        return self._graph.bind(tensors, shared=shared)


Shapes = dict[str, set[tuple[tuple[str, int], ...]]]


@pytest.fixture(scope="module", params=["fp16", "fp8"])
def precision(request: pytest.FixtureRequest) -> str:
    """In fp8 a lone row is joined by another."""
    return str(request.param)


@pytest.fixture(scope="module")
def bound(precision: str, tiny_target: Path, tiny_head: Path) -> Shapes:
    """Every set of sizes that the runtime binds, by graph, for all kinds of prompts, trees and rules."""
    return record(precision, modules_of(tiny_target, tiny_head), TREES)


def record(precision: str, modules: Modules, trees: Sequence[TreeShape]) -> Shapes:
    seen: Shapes = {"target": set(), "draft": set(), "fuse": set()}
    for batch in (1, LIMITS.max_batch):
        engine = eager_engine(
            modules,
            batch=batch,
            max_seq_len=LIMITS.max_seq_len,
            chunk=LIMITS.prefill_chunk,
            extra_rows=ROWS - LIMITS.max_seq_len,
            max_tree_nodes=LIMITS.max_tree_nodes,
        )
        graphs = engine.runner.graphs
        graphs["target"] = Recorder(graphs["target"], seen["target"])
        graphs["target"] = padded_graph(graphs["target"], precision)
        graphs |= {name: Recorder(graphs[name], seen[name]) for name in ("draft", "fuse")}
        for shape in trees:
            _run(engine, shape, "topk")
            if shape.kind != "dynamic":
                _run(engine, shape, "sampled")
        if len(trees) == 1:
            continue
        for graph in ("target", "draft"):  # as `--tree auto` does
            forward_seconds(engine.runner, graph, LIMITS.max_tree_nodes, capture=False)
        fuse_seconds(engine.runner, capture=False)
    return seen


def _run(engine: Engine, shape: TreeShape, rule: str) -> None:
    requests = [Request((5,) * length, max_new_tokens=2) for length in LENGTHS]
    answers_of(engine, requests, shape, rule=rule)


@pytest.mark.slow
def test_the_recording_is_worth_something(bound: Shapes) -> None:
    sizes = {graph: [dict(found) for found in bound[graph]] for graph in bound}
    assert {found["T"] for found in sizes["target"]} >= {2, 8, 10, 16, 24, 32}
    assert {found["R"] for found in sizes["target"]} >= {1, 10, 32}
    assert {found["KV"] for found in sizes["draft"]} >= {128, 160, 192}
    assert {found["T"] for found in sizes["draft"]} >= {1, 2, 3, 4, 8, 15, 24, 31, 32}
    assert {found["T"] for found in sizes["fuse"]} >= {2, 4, 8, 24, 32}
    assert {found["B"] for found in sizes["fuse"]} == {1, 3}


@pytest.mark.parametrize("names", SUBSETS)
@pytest.mark.parametrize("graph", ["target", "draft", "fuse"])
def test_what_the_runtime_binds_fits_a_profile(
    graph: str, names: tuple[str, ...], bound: Shapes, precision: str
) -> None:
    profiles = choose_profiles(graph, LIMITS, TREE, names, precision=precision)
    for found in bound[graph]:
        assert any(fits(profile, dict(found)) for profile in profiles), (found, profiles)


def test_without_a_head_plain_decoding_fits(precision: str, tiny_target: Path, tiny_head: Path) -> None:
    seen = record(precision, modules_of(tiny_target, tiny_head), [TreeShape.plain()])
    names = EngineOptions(backend="tensorrt-rtx").profile_names(precision, has_head=False)
    profiles = choose_profiles("target", LIMITS, None, names, precision=precision)
    rows = {dict(found)["T"] for found in seen["target"] if dict(found)["B"] == 1}
    assert min(rows) == (2 if precision == "fp8" else 1)
    for found in seen["target"]:
        assert any(fits(profile, dict(found)) for profile in profiles), (found, profiles)


@pytest.mark.parametrize("graph", ["target", "draft", "fuse"])
def test_sizes_beyond_the_limits_fit_none(graph: str) -> None:
    inside = {"B": 3, "T": 1, "R": 1, "KV": 192}
    for axis, size in (("B", 4), ("T", 33), ("R", 33), ("KV", 193)):
        if graph == "fuse" and axis in ("R", "KV"):
            continue
        assert not any(fits(p, {**inside, axis: size}) for p in choose_profiles(graph, LIMITS, TREE))
    assert any(fits(profile, inside) for profile in choose_profiles(graph, LIMITS, TREE))


def test_each_profile_is_tuned_for_its_use() -> None:
    by_name = {profile.name: profile.axes for profile in choose_profiles("target", LIMITS, TREE)}
    assert list(by_name) == ["prefill", "verify", "plain"]
    assert (by_name["prefill"]["T"].opt, by_name["prefill"]["R"].max) == (24, 1)
    assert (by_name["verify"]["T"].opt, by_name["verify"]["R"].opt) == (10, 10)
    assert {by_name["plain"][axis].max for axis in ("T", "R")} == {1}  # a decode kernel needs fixed sizes
    draft = {profile.name: profile.axes for profile in choose_profiles("draft", LIMITS, TREE)}
    assert list(draft) == ["prefill", "draft"]
    assert draft["draft"]["T"].opt == TREE.top_k


def test_names_of_other_graphs_are_skipped() -> None:
    def names(graph: str, tree: TreeDefaults | None, *wanted: str) -> list[str]:
        return [profile.name for profile in choose_profiles(graph, LIMITS, tree, wanted)]

    assert names("target", None) == ["prefill", "plain"]  # no head, no trees to verify
    assert names("target", None, "prefill", "verify") == ["prefill"]
    assert names("draft", TREE, "verify", "plain") == ["draft"]
    assert names("draft", TREE, "prefill") == ["prefill"]
    assert names("fuse", TREE, "plain") == ["fuse"]
    assert names("target", TREE, *reversed(PROFILE_NAMES)) == ["prefill", "verify", "plain"]


def test_names_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="found decode, extra"):
        choose_profiles("fuse", LIMITS, TREE, ("decode", "prefill", "extra"))
    with pytest.raises(UsageError, match="cannot serve prompts"):
        choose_profiles("target", LIMITS, TREE, ("plain",))


def test_the_draft_profile_grows_with_a_tree_that_is_deeper_than_the_chunk() -> None:
    deep = TreeDefaults(kind="chain", depth=31, top_k=1, nodes=32)
    limits = LIMITS.model_copy(update={"prefill_chunk": 8})
    assert any(
        fits(profile, {"B": 1, "T": 32, "R": 1, "KV": 192})
        for profile in choose_profiles("draft", limits, deep)
    )


def test_shapes_of_a_tensor() -> None:
    mask = TensorSpec("tree_mask", "bool", ("B", 1, "T", "KV"))
    verify = choose_profiles("target", LIMITS, TREE)[1]
    least, tuned, most = tensor_range(mask, verify)
    assert (least, most) == ((1, 1, 1, 1), (3, 1, 32, 192))
    assert tuned[:3] == (1, 1, 10)
