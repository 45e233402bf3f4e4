"""A round never waits for the device: no host read, no shape that depends on data. Proved without a GPU.

Under `FakeTensorMode` tensors have shapes but no values, so `.item()`, `bool(tensor)`, `nonzero` and the like
cannot work and raise. "meta" stands for the GPU: a device that is not the host's, which every build of torch
has; a build with CUDA takes "cuda" as well. What passes here can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eagle_run.engine.round
from eagle_export.heads.spec import HeadSpec
from eagle_export.models.head import Draft, Fuse
from eagle_export.models.target import TargetModule
from eagle_export.reference.eager import draft_graph, fuse_graph, target_graph
from eagle_run.backends.base import Graph
from eagle_run.decoding.acceptance import AcceptedPath
from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.sampling import stack
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.model_runner import BatchState, ModelRunner
from eagle_run.engine.round import run_round
from eagle_run.params import SamplingParams

VOCAB, DRAFT_VOCAB, HIDDEN, ROWS, BATCH, KV = 96, 48, 32, 64, 3, 48
SHAPES = {
    "plain": TreeShape.plain(),
    "dynamic": TreeShape.dynamic(3, 3, 10),
    "static": TreeShape.static((-1, 0, 0, 1, 1, 2)),
    "chain": TreeShape.chain(3),
}
DEVICES = ["cpu", "meta", *(["cuda"] if torch.backends.cuda.is_built() else [])]
GREEDY = [SamplingParams(temperature=0)] * BATCH
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9, min_p=0.1, seed=2),
]
SPEC = HeadSpec(
    algorithm="eagle3",
    dialect="safeai",
    layers=1,
    hidden_size=HIDDEN,
    target_hidden_size=HIDDEN,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    act="silu",
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    feature_layers=(0, 1),
    max_positions=128,
)
EAGLE1 = replace(SPEC, algorithm="eagle1", draft_vocab_size=VOCAB, feature_layers=(2,))


def make_graphs(spec: HeadSpec) -> dict[str, Graph]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    target = TargetModule(LlamaForCausalLM(config).eval(), spec.feature_layers)
    draft = Draft(spec)
    # The frequencies are made on the host whatever the default device is; a loaded head is moved as a whole.
    draft.rope.inv_freq = draft.rope.inv_freq.to(draft.lm_head.weight.device)
    graphs: dict[str, Graph] = {
        "target": target_graph(target, ROWS),
        "draft": draft_graph(draft, ROWS),
    }
    if spec.has_fuse:
        graphs["fuse"] = fuse_graph(Fuse(spec))
    return graphs


class NoTransfers(TorchDispatchMode):
    """Raises where tensors of two devices meet, a copy from one to the other included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert len(devices) <= 1, f"{func} moves data between {devices}"
        return result


@contextmanager
def fake_round(
    device: str, settings: list[SamplingParams], depth: int, spec: HeadSpec = SPEC
) -> Iterator[Any]:
    """A runner and the state of a batch in the middle of its answers, all without values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device(device):
            graphs, ids = make_graphs(spec), torch.arange(spec.draft_vocab_size)
        runner = ModelRunner(graphs, batch=BATCH, draft_to_target=ids, device=device)
        state = runner.new_state(depth + 1, stack(settings, device))
        with NoTransfers():
            yield runner, state


def tensors_of(state: BatchState) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "rule", "settings"),
    [
        *((name, "topk", settings) for name in SHAPES for settings in (GREEDY, MIXED)),
        *((name, "sampled", MIXED) for name in ("plain", "static", "chain")),
        ("static", "sampled", GREEDY),
    ],
)
def test_a_round_reads_nothing(name: str, rule: str, settings: list[SamplingParams], device: str) -> None:
    shape = SHAPES[name]
    with fake_round(device, settings, shape.depth) as (runner, state):
        before = {key: (value.shape, value.dtype) for key, value in tensors_of(state).items()}
        path = run_round(runner, state, SpeculativeConfig(shape, AcceptanceRule(rule)), kv=KV).path
        assert path.nodes.shape == path.tokens.shape == (BATCH, shape.depth + 1)
        assert path.length.shape == (BATCH,)
        assert path.tokens.device.type == device
        assert {key: (value.shape, value.dtype) for key, value in tensors_of(state).items()} == before


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_of_an_eagle1_head_reads_nothing(device: str) -> None:
    shape = SHAPES["dynamic"]
    with fake_round(device, MIXED, shape.depth, EAGLE1) as (runner, state):
        assert run_round(runner, state, SpeculativeConfig(shape), kv=KV).path.tokens.shape == (
            BATCH,
            shape.depth + 1,
        )


def test_the_state_keeps_its_memory() -> None:
    """A captured round finds state and caches where they were: they are written in place, never replaced."""
    shape = SHAPES["dynamic"]
    runner = ModelRunner(make_graphs(SPEC), batch=BATCH, draft_to_target=torch.arange(DRAFT_VOCAB))
    state = runner.new_state(shape.depth + 1, stack(MIXED))
    owned = {**tensors_of(state), "target": runner.target_cache, "draft": runner.draft_cache}
    places = {name: tensor.data_ptr() for name, tensor in owned.items()}
    for _ in range(3):
        run_round(runner, state, SpeculativeConfig(shape), kv=KV)
    now = {**tensors_of(state), "target": runner.target_cache, "draft": runner.draft_cache}
    assert {name: tensor.data_ptr() for name, tensor in now.items()} == places
    assert bool((state.length > 0).all())


def run_with(read: Callable[[AcceptedPath], None], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round with a fault: `read` looks at the path before it is committed."""
    true = eagle_run.engine.round.commit

    def commit(
        runner: ModelRunner, state: BatchState, shape: TreeShape, path: AcceptedPath, seen: Any
    ) -> None:
        read(path)
        true(runner, state, shape, path, seen)

    monkeypatch.setattr(eagle_run.engine.round, "commit", commit)
    shape = SHAPES["dynamic"]
    with fake_round(device, MIXED, shape.depth) as (runner, state):
        run_round(runner, state, SpeculativeConfig(shape), kv=KV)


def _item(path: AcceptedPath) -> None:
    path.length.max().item()


def _branch(path: AcceptedPath) -> None:
    if path.length[0] > 1:
        raise AssertionError


def _nonzero(path: AcceptedPath) -> None:
    torch.empty(path.length.nonzero().shape[0])


def _slice(path: AcceptedPath) -> None:
    path.tokens[:, : path.length.max()].clone()


def _fetch(path: AcceptedPath) -> None:
    path.tokens.to("cpu", copy=True)


def test_a_transfer_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="moves data"):
        run_with(_fetch, "meta", monkeypatch)


@pytest.mark.parametrize("read", [_item, _branch, _nonzero, _slice])
@pytest.mark.parametrize("device", DEVICES)
def test_a_host_read_would_be_caught(
    read: Callable[[AcceptedPath], None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: each usual way to wait for a value raises inside a round."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        run_with(read, device, monkeypatch)
