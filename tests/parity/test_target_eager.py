"""The eager target module against Transformers' own forward, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.familymaker import CHUNK, WINDOW
from support.targetmaker import KINDS, ROWS, Runner, assert_rows, make_model, path_of, plain, tokens_of
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_export.models.target import TargetModule, native_operators
from eagle_export.reference.eager import target_graph
from eagle_run.dtypes import DTYPES
from eagle_run.errors import EagleError

torch.set_num_threads(1)
LAYERS = (1, 3)  # 3 is the output of the final norm
PARENTS = (-1, 0, 0, 1, 1, 2, 5)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: make_model(kind) for kind in KINDS}


def runner(model: Any, batch: int) -> Runner:
    return Runner(target_graph(TargetModule(model, LAYERS), ROWS), batch)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_then_decode(kind: str, models: dict[str, Any]) -> None:
    tokens = tokens_of(13, seed=1)
    run = runner(models[kind], 1)
    for first, last in ((0, 5), (5, 10), (10, 12), (12, 13)):
        found = run.extend([tokens[first:last]], [first])
        expected = {(0, t - first): tokens[: t + 1] for t in range(first, last)}
        assert_rows(models[kind], LAYERS, found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_tree_rows_equal_plain_sequences(kind: str, models: dict[str, Any]) -> None:
    """Two sequences of different length in one batch, each with its own tree."""
    prefixes = [tokens_of(9, seed=2), tokens_of(4, seed=3)]
    run = runner(models[kind], 2)
    run.extend([prefixes[0][:4], prefixes[1]], [0, 0])
    run.extend(
        [prefixes[0][4:], tokens_of(5, seed=4)], [4, 4]
    )  # what the second one gets here is overwritten
    trees = [tokens_of(len(PARENTS), seed=5), tokens_of(len(PARENTS), seed=6)]
    found = run.tree(trees, PARENTS, [9, 4])
    expected = {
        (b, node): prefixes[b] + [trees[b][i] for i in path_of(PARENTS, node)]
        for b in range(2)
        for node in range(len(PARENTS))
    }
    assert_rows(models[kind], LAYERS, found, expected, atol=1e-4)


def test_logits_index_picks_rows_of_each_sequence(models: dict[str, Any]) -> None:
    model = models["qwen2"]
    tokens = [tokens_of(5, seed=7), tokens_of(5, seed=8)]
    ids = torch.tensor(tokens)
    positions = torch.arange(5).expand(2, 5)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    index = torch.tensor([[4, 0, 4], [2, 3, 1]])
    logits, _ = runner(model, 2)(ids, positions, mask, torch.zeros(2, dtype=torch.int64), index)
    assert logits.shape == (2, 3, model.config.vocab_size)
    for b in range(2):
        for r, row in enumerate(index[b].tolist()):
            want = plain(model, tokens[b][: row + 1], LAYERS).logits
            torch.testing.assert_close(logits[b, r], want, atol=1e-4, rtol=0)


def test_the_wrapped_model_stays_as_it_was(models: dict[str, Any]) -> None:
    model = models["llama"]
    before = plain(model, tokens_of(6, seed=9), LAYERS)
    implementation = model.config._attn_implementation
    runner(model, 1).extend([tokens_of(6, seed=9)], [0])
    with pytest.raises(RuntimeError, match="inside"), native_operators(model):
        raise RuntimeError("inside")
    after = plain(model, tokens_of(6, seed=9), LAYERS)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.features, after.features)
    assert model.config._attn_implementation == implementation


def test_bfloat16_gives_float32_logits_and_bfloat16_features() -> None:
    model = make_model("llama").to(torch.bfloat16)
    tokens = tokens_of(6, seed=10)
    logits, features = runner(model, 1).extend([tokens], [0])
    assert (logits.dtype, features.dtype) == (torch.float32, torch.bfloat16)
    want = plain(model, tokens, LAYERS)
    # Transformers keeps attention in bfloat16, the graph widens it: equal to within a few steps of bfloat16.
    torch.testing.assert_close(logits[0, -1], want.logits, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("kind", ["mistral-window", "gemma3", "gpt-oss", "llama4"])
def test_with_mask_and_rows_as_a_gpu_takes_them(kind: str, models: dict[str, Any]) -> None:
    """Windows and sinks where the mask comes as a bias, worked out once a forward."""
    module = TargetModule(models[kind], LAYERS)
    prefixes, trees = (
        [tokens_of(9, seed=2), tokens_of(9, seed=3)],
        [tokens_of(7, seed=5), tokens_of(7, seed=6)],
    )
    found = []
    for fused in (True, False):
        run = Runner(target_graph(module, ROWS, fused=fused), 2)
        run.extend(prefixes, [0, 0])
        found.append(run.tree(trees, PARENTS, [9, 9]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "gemma3", "gpt-oss", "llama4"])
def test_runs_on_fake_tensors(kind: str) -> None:
    """No host read and no data-dependent shape: under FakeTensorMode either would raise."""
    with FakeTensorMode():
        model = make_model(kind)
        module = TargetModule(model, LAYERS)
        graph = target_graph(module, ROWS)
        sizes = {"B": 2, "T": 3, "R": 2, "KV": 8}
        tensors: dict[str, torch.Tensor] = {}
        for tensor in (*graph.spec.inputs, *graph.spec.outputs):
            shape = [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
            past = tensor.name.replace("present", "past")
            made = tensors.get(past, torch.zeros(shape, dtype=DTYPES[tensor.dtype].torch))
            tensors[tensor.name] = made
        graph.bind(tensors)()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_before_the_final_norm(kind: str, models: dict[str, Any]) -> None:
    """One id beyond Transformers' hidden_states: with the final norm over it, it is their last one."""
    model, tokens = models[kind], tokens_of(11, seed=15)
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    hook.remove()
    _, features = Runner(target_graph(TargetModule(model, (1, 3, 4)), ROWS), 1).extend([tokens], [0])
    want = torch.cat((out.hidden_states[1], out.hidden_states[3], seen[0]), -1)
    torch.testing.assert_close(features, want, atol=1e-4, rtol=1e-4)
    assert not model.model.norm._forward_pre_hooks
    assert (out.hidden_states[3] - seen[0]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["mistral-window", "gemma3", "gpt-oss", "llama4"])
@pytest.mark.parametrize("longest", [WINDOW, WINDOW + 2])
def test_a_window_that_no_sequence_outgrows_hides_nothing(
    kind: str, longest: int, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches are longer than sequences: they have room for a tree behind them."""
    from eagle_export.models import target

    narrowed: list[int] = []
    real = target._narrowed
    monkeypatch.setattr(target, "_narrowed", lambda *given: narrowed.append(1) or real(*given))
    tokens = tokens_of(longest, seed=16)
    run = Runner(target_graph(TargetModule(models[kind], LAYERS, longest), ROWS), 1)
    found = run.extend([tokens], [0])
    expected = {(0, row): tokens[: row + 1] for row in range(longest)}
    assert_rows(models[kind], LAYERS, found, expected, atol=1e-4)
    assert bool(narrowed) is (longest > (CHUNK if kind == "llama4" else WINDOW))


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1,), (5,)])
def test_feature_layers_that_do_not_fit_are_refused(layers: tuple[int, ...], models: dict[str, Any]) -> None:
    with pytest.raises(EagleError, match="feature layers"):
        TargetModule(models["llama"], layers)
