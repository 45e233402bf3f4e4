"""Calibration sees what inference will see, all of it, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.fp8ref import PROMPTS, TREE
from torch import Tensor, nn

from eagle_export.checkpoints.fp8_scales import Scales
from eagle_export.quantize.fp8.calibrate import calibrate, decode, named_graphs, named_linears
from eagle_export.reference.modules import Modules
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine import model_runner as sessions
from eagle_run.errors import EagleError, UsageError


@contextmanager
def everything(modules: Modules) -> Iterator[dict[tuple[str, str], list[Tensor]]]:
    """All rows that each linear layer reads, as copies; of a prime, those up to the last pending pair.

    Which those are is read from the forward itself: it asks for logits of the last pair only. The first
    forward of a prompt starts at position 0 and is no prime.
    """
    seen: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    real: dict[str, int | None] = {"target": None, "draft": None}

    def begin(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        ids, _, positions, _, _, index = args[:6]
        prime = index.shape[1] == 1 and ids.shape[1] > 1 and int(positions[0, 0]) > 0
        real["draft"] = int(index[0, 0]) + 1 if prime else None

    handles = []
    for graph, module in named_graphs(modules).items():
        if graph == "draft":
            handles.append(module.register_forward_pre_hook(begin))
        for name, linear in named_linears(module).items():

            def keep(_: nn.Module, args: tuple[Tensor, ...], key: tuple[str, str] = (graph, name)) -> None:
                rows = real.get(key[0])
                whole = rows is None or key[1] == "lm_head"
                seen[key].append((args[0] if whole else args[0][:, :rows]).clone())

            handles.append(linear.register_forward_pre_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def test_scales_are_the_largest_of_everything_seen(modules: Modules) -> None:
    with everything(modules) as seen:
        scales = calibrate(modules, PROMPTS, shape=TREE, tokens=8)
    for (graph, name), rows in seen.items():
        if graph == "fuse":
            continue  # its stale rows are not told apart by the forward; see the test below
        largest = max(float(x.abs().max()) for x in rows)
        assert scales.inputs[graph][name] == pytest.approx(largest / 448, rel=1e-6), (graph, name)
    assert {graph: len(layers) for graph, layers in scales.inputs.items()} == {
        "target": 3 * 7 + 1,
        "fuse": 1,
        "draft": 7 + 1,
    }
    assert scales.tokens > sum(map(len, PROMPTS)) + 8 * len(PROMPTS) - 1


def test_no_forward_has_padded_rows(modules: Modules) -> None:
    rows = []
    handle = modules.target.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    calibrate(modules, PROMPTS, shape=TREE, tokens=4)
    handle.remove()
    assert set(rows) == {TREE.nodes} | {len(prompt) - 1 for prompt in PROMPTS}


def test_rows_that_carry_nothing_do_not_count(
    modules: Modules, scales: Scales, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the pending pairs a prime has whatever was there before: here, something huge."""
    new_state = sessions.ModelRunner.new_state

    def poisoned(self: sessions.ModelRunner, *args: object) -> sessions.State:
        state = new_state(self, *args)  # type: ignore[arg-type]
        state.pending_features.fill_(1e6)
        return state

    monkeypatch.setattr(sessions.ModelRunner, "new_state", poisoned)
    again = calibrate(modules, PROMPTS, shape=TREE, tokens=8)
    assert again.inputs == scales.inputs
    assert again.peaks == scales.peaks


def test_the_draft_is_seen_on_its_own_hidden_states(modules: Modules) -> None:
    """Below the first level it reads what it gave; those rows count, and here they have the largest value."""
    fed_back: list[Tensor] = []
    last: list[Tensor] = [torch.empty(0)]

    def grow(_: nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if args[5].shape[1] == args[0].shape[1]:  # a level: logits of every row
            fed_back.append(args[1].clone())
            assert all(any(torch.equal(row, given) for given in last[0]) for row in args[1][0])
        last[0] = out[1][0] * 100
        return (out[0], out[1] * 100, *out[2:])

    handle = modules.draft.register_forward_hook(grow)
    try:
        deep = calibrate(modules, PROMPTS, shape=TREE, tokens=4)
        assert fed_back
        fed_back.clear()
        flat = calibrate(modules, PROMPTS, shape=TreeShape.dynamic(1, 2, 3), tokens=4)
        assert not fed_back
    finally:
        handle.remove()
    assert deep.peaks["draft"] > 5 * flat.peaks["draft"]


def test_without_a_head_the_target_decodes_alone(modules: Modules) -> None:
    alone = Modules(modules.model, modules.target, None, None, None)
    scales = calibrate(alone, PROMPTS, shape=TREE, tokens=4)
    assert set(scales.inputs) == {"target"}
    assert set(scales.peaks) == {"target"}


def test_answers_are_those_of_plain_decoding_and_end_at_a_stop_token(modules: Modules) -> None:
    tree = decode(modules, PROMPTS, shape=TREE, tokens=8)
    plain = decode(modules, PROMPTS, shape=None, tokens=8)
    assert [answer[:8] for answer in tree] == [answer[:8] for answer in plain]
    stop = plain[0][2]
    (short,) = decode(modules, PROMPTS[:1], shape=None, tokens=8, stop_tokens=(stop,))
    assert short == plain[0][: plain[0].index(stop) + 1]


def test_progress_and_no_trace_left(modules: Modules) -> None:
    told: list[tuple[int, int]] = []

    def hooks() -> int:
        parts = [part for module in named_graphs(modules).values() for part in module.modules()]
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts)

    decode(modules, PROMPTS, shape=TREE, tokens=1)  # Transformers adds hooks of its own once
    before = hooks()
    calibrate(modules, PROMPTS, tokens=1, on_progress=lambda done, all_: told.append((done, all_)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert hooks() == before


def test_values_that_are_not_finite_are_an_error(modules: Modules) -> None:
    weight = modules.model.model.layers[1].mlp.up_proj.weight.data
    kept = weight[0, 0].clone()
    weight[0, 0] = torch.inf
    try:
        with pytest.raises(EagleError, match="not finite"):
            calibrate(modules, PROMPTS, tokens=1)
    finally:
        weight[0, 0] = kept


@pytest.mark.parametrize("prompts", [(), ((),), ((2, 3), ())])
def test_calibration_needs_prompts(modules: Modules, prompts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UsageError, match="prompts"):
        calibrate(modules, prompts)
