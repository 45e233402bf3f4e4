"""The unrolled draft against the draft as it is used: row by row, over a KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.trainset import batch_of, head_of, spec_of
from torch import Tensor

from eagle_export.models.head import Draft, Fuse
from eagle_export.train import attention
from eagle_export.train.attention import _Merged, merged_by_chunks
from eagle_export.train.ttt import Batch, label_rows, starts, unroll

STEPS = 4


def inference(  # noqa: PLR0917
    fuse: Fuse | None, draft: Draft, batch: Batch, row: int, start: int, steps: int
) -> list[Tensor]:
    """Logits [Vd] of each step, as decoding gets them: prime with all pairs up to `start`, then draft."""
    spec, cache = draft.spec, 64
    past = [torch.zeros(1, spec.kv_heads, cache, spec.head_dim) for _ in range(2)]
    tokens = batch.tokens[row]
    features = batch.features[row : row + 1, : start + 1]
    hidden = features if fuse is None else fuse(features)
    count = start + 1
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    ids = tokens[1 : count + 1][None]
    at = torch.tensor([0])
    logits, out, *past = draft(
        ids, hidden, torch.arange(count)[None], mask, at, torch.tensor([[start]]), *past
    )
    found, back = [logits[0, 0]], out[:, -1:]
    for step in range(1, steps):
        place = torch.tensor([start + step])
        if start + 1 + step >= len(tokens):
            break
        ids = tokens[start + 1 + step].view(1, 1)
        mask = torch.ones(1, 1, 1, start + step + 1, dtype=torch.bool)
        logits, back, *past = draft(ids, back, place[None], mask, place, torch.tensor([[0]]), *past)
        found.append(logits[0, 0])
    return found


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_output": True}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle1", {}),
    ],
    ids=["eagle3", "norm_output", "norm_before_residual", "eagle1"],
)
def test_every_step_has_the_logits_of_inference(algorithm: str, changes: dict[str, Any]) -> None:
    spec = spec_of(algorithm, **changes)
    fuse, draft = head_of(spec)
    batch = batch_of(spec, lengths=[17, 23, 12], prompts=[5, 9, 3])
    with torch.no_grad():
        found = unroll(fuse, draft, batch, STEPS)
        logits = [draft.logits(raw) for raw in found.raw]
        compared = 0
        for n, flat in enumerate(found.rows.tolist()):
            row, start = divmod(flat, batch.tokens.shape[1])
            for step, expected in enumerate(inference(fuse, draft, batch, row, start, STEPS)):
                torch.testing.assert_close(logits[step][n], expected, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > 100
    assert logits[1].std() > 0.5  # they do differ, so a mistake would show


def test_a_later_step_needs_its_own_keys() -> None:
    """The comparison above would notice a step that looks at the sequence alone."""
    spec = spec_of()
    fuse, draft = head_of(spec)
    batch = batch_of(spec, lengths=[17], prompts=[5])
    with torch.no_grad():
        long = unroll(fuse, draft, batch, 3).raw[2]
        short = unroll(fuse, draft, replace(batch, tokens=batch.tokens.roll(1, 1)), 3).raw[2]
    assert not torch.allclose(long, short, atol=1e-2)


def test_rows_that_share_a_batch_do_not_touch() -> None:
    spec = spec_of()
    fuse, draft = head_of(spec)
    both = batch_of(spec, lengths=[17, 23], prompts=[5, 9])
    alone = Batch(*(x[:1, :17] for x in (both.tokens, both.answers, both.features, both.last, both.best)))
    with torch.no_grad():
        together, single = unroll(fuse, draft, both, 3), unroll(fuse, draft, alone, 3)
    count = len(single.rows)
    assert torch.equal(together.valid[:, :count], single.valid)
    for a, b, valid in zip(together.raw, single.raw, single.valid, strict=True):
        torch.testing.assert_close(a[:count][valid], b[valid], rtol=1e-4, atol=1e-5)


def merged_slowly(  # noqa: PLR0917
    q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, rows: Tensor, scale: float
) -> Tensor:
    """Every row and head by itself: one softmax over all the keys that it sees."""
    found = []
    for n, flat in enumerate(rows.tolist()):
        row, at = divmod(flat, keys.shape[2])
        k = torch.cat((keys[row, :, : at + 1].transpose(0, 1), own_k[:, n]))  # [at + 1 + i, Hq, Dh]
        v = torch.cat((values[row, :, : at + 1].transpose(0, 1), own_v[:, n]))
        share = (scale * (k * q[n]).sum(-1)).softmax(0)  # [at + 1 + i, Hq]
        found.append((share[..., None] * v).sum(0))
    return torch.stack(found)


def merging_inputs(length: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """For two sequences, four heads and three later steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 4, 8), (2, 4, length, 8), (2, 4, length, 8), (3, rows, 4, 8), (3, rows, 4, 8)]
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 256], ids=lambda chunk: f"chunk {chunk}" if chunk else "fused")
def test_merged_attention_and_its_gradients_are_those_of_the_plain_formula(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On chunks of rows in float64, and with the kernel of a CPU in float32."""
    monkeypatch.setattr(attention, "_CHUNK", chunk)
    rows = torch.tensor([2, 3, 5, 8, 9, 13])  # of a grid of 2 x 7
    inputs = merging_inputs(7, 6, torch.float64 if chunk else torch.float32)
    weight = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (merged_slowly, merged_by_chunks if chunk else _Merged.apply):
        out = function(*inputs, rows, 0.3)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-6 if chunk else 1e-5)


def test_no_scores_outlive_a_chunk_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CHUNK", 16)
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    inputs = merging_inputs(256, 6, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        merged_by_chunks(*inputs, torch.arange(200, 206), 0.3).sum().backward()
    assert 0 < max(kept) <= 2 * 4 * 256 * 8  # as large as the keys; all scores were 32 times that


@pytest.mark.parametrize("norm_output", [False, True])
def test_a_gpus_way_through_the_unrolled_draft_is_a_cpus(
    norm_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of every step, and gradients of all weights."""
    spec = spec_of(norm_output=norm_output)
    batch = batch_of(spec, lengths=[17, 23, 12], prompts=[5, 9, 3])
    results = []
    for chunked in (False, True):
        if chunked:
            monkeypatch.setattr(attention, "_CHUNK", 5)
            monkeypatch.setattr(attention._Merged, "apply", merged_by_chunks)
        fuse, draft = head_of(spec)
        raw = torch.stack(unroll(fuse, draft, batch, STEPS).raw)
        raw.square().mean().backward()
        results.append((raw, *(p.grad for p in draft.midlayer.parameters())))
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-4)


def test_starts_labels_and_masks_of_a_conversation_by_hand() -> None:
    """Tokens 0 1 2 | 3 4 5 6: three of a prompt, four of an answer, one place of padding."""
    spec = spec_of()
    batch = batch_of(spec, lengths=[8, 7], prompts=[8, 3])  # the first conversation has no answer
    rows = starts(batch)
    assert rows.tolist() == [8 + s for s in (1, 2, 3, 4)]  # pair s predicts token s + 2: 3, 4, 5, 6
    labels, valid = label_rows(batch, rows, 3)
    assert labels[0].tolist() == [8 + t for t in (2, 3, 4, 5)]  # the target's row s + 1
    assert labels[1, :3].tolist() == [8 + t for t in (3, 4, 5)]
    assert valid.tolist() == [
        [True, True, True, True],
        [True, True, True, False],  # pair 4 would predict token 7, which is padding
        [True, True, False, False],
    ]


def test_a_path_ends_where_the_user_speaks_again() -> None:
    spec = spec_of()
    batch = batch_of(spec, lengths=[9], prompts=[2])
    batch.answers[0, 5:7] = False  # answer 2..4, user 5..6, answer 7..8
    rows = starts(batch)
    assert rows.tolist() == [0, 1, 2, 5, 6]
    _, valid = label_rows(batch, rows, 4)
    assert valid[:, 1].tolist() == [True, True, False, False]  # and not true again for token 7
    assert valid[:, 4].tolist() == [True, False, False, False]
