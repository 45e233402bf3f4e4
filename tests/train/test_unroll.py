"""The unrolled draft against the draft as it is used: row by row, over a KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainset import batch_of, head_of, spec_of

from eagle_export.models.head import Draft, Fuse
from eagle_export.train.attention import _Merged, merged_plain
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


def test_merged_attention_and_its_gradients_are_those_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([2, 3, 5, 8, 9, 13])  # of a grid of 2 x 7

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    inputs = [draw(6, 4, 8), draw(2, 4, 7, 8), draw(2, 4, 7, 8), draw(3, 6, 4, 8), draw(3, 6, 4, 8)]
    weight = torch.randn(6, 4, 8, generator=generator)
    results = []
    for function in (merged_plain, _Merged.apply):
        out = function(*inputs, rows, 0.3)
        grads = torch.autograd.grad((out * weight).sum(), inputs)
        results.append((out, *grads))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_merged_attention_is_one_softmax_over_what_a_row_sees() -> None:
    generator = torch.Generator().manual_seed(0)
    q, keys, values, own_k, own_v = (
        torch.randn(*shape, generator=generator)
        for shape in ((2, 1, 8), (1, 1, 7, 8), (1, 1, 7, 8), (2, 2, 1, 8), (2, 2, 1, 8))
    )
    rows = torch.tensor([1, 4])
    out = _Merged.apply(q, keys, values, own_k, own_v, rows, 0.5)
    for n, row in enumerate(rows.tolist()):
        k = torch.cat((keys[0, 0, : row + 1], own_k[:, n, 0]))
        v = torch.cat((values[0, 0, : row + 1], own_v[:, n, 0]))
        expected = (0.5 * k @ q[n, 0]).softmax(0) @ v
        torch.testing.assert_close(out[n, 0], expected, rtol=1e-4, atol=1e-5)


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
