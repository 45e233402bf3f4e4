"""Losses against numbers made by hand and against the plain formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.trainset import VOCAB, WIDTH, batch_of, head_of, spec_of

from eagle_export.train.loss import CHUNK, feature_loss, soft_cross_entropy, target_goal
from eagle_export.train.objective import Objective
from eagle_export.train.settings import TrainSettings
from eagle_export.train.ttt import label_rows, unroll


def test_soft_cross_entropy_by_hand() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    head = torch.tensor([[math.log(2.0), 0.0], [0.0, math.log(3.0)]])
    goal = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    weight = torch.tensor([1.0, 0.25, 0.0])
    found = soft_cross_entropy(hidden, head, goal, torch.tensor([0, 1, 0]), weight)
    # Row 0: q = (2/3, 1/3), p = (1/2, 1/2). Row 1: q = (1/4, 3/4), p = (1, 0). Row 2 does not count.
    first = -0.5 * (math.log(2 / 3) + math.log(1 / 3))
    second = -math.log(1 / 4)
    assert float(found.loss) == pytest.approx(first + 0.25 * second, rel=1e-6)
    assert found.cross_entropy[:2].tolist() == pytest.approx([first, second], rel=1e-6)
    assert found.guess.tolist() == [0, 1, 1]


@pytest.mark.parametrize("rows", [3, CHUNK + 7])
def test_gradients_are_those_of_the_plain_formula(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 12, generator=generator).requires_grad_() for n in (rows, 25))
    goal = torch.randn(9, 25, generator=generator).softmax(-1)
    index = torch.randint(0, 9, (rows,), generator=generator)
    weight = torch.rand(rows, generator=generator)
    plain = -((goal[index] * (hidden @ head.T).log_softmax(-1)).sum(-1) * weight).sum()
    fused = soft_cross_entropy(hidden, head, goal, index, weight).loss
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(3 * fused, (hidden, head)),
        torch.autograd.grad(3 * plain, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_head_that_stays_gets_no_gradient() -> None:
    hidden, head = torch.randn(4, 12).requires_grad_(), torch.randn(25, 12)
    goal = torch.full((1, 25), 1 / 25)
    soft_cross_entropy(hidden, head, goal, torch.zeros(4, dtype=torch.long), torch.ones(4)).loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() > 0
    assert head.grad is None


def test_the_goal_is_the_target_within_the_draft_vocabulary() -> None:
    lm_head = torch.randn(VOCAB, WIDTH)
    ids = torch.tensor([3, 4, 9, 20])
    own = torch.full((VOCAB,), -1)
    own[ids] = torch.arange(4)
    last = torch.randn(6, WIDTH)
    logits = last @ lm_head.T
    goal = target_goal(last, logits.argmax(-1), lm_head[ids], own)
    within = logits.softmax(-1)[:, ids]
    torch.testing.assert_close(goal.probabilities, within / within.sum(-1, keepdim=True))
    for row, best in enumerate(logits.argmax(-1).tolist()):
        assert goal.best[row] == (ids.tolist().index(best) if best in ids else -1)
    few = target_goal(last, logits.argmax(-1), lm_head[ids], own, top=2).probabilities
    assert ((few > 0).sum(-1) == 2).all()
    torch.testing.assert_close(few.sum(-1), torch.ones(6))


def test_smooth_l1_by_hand() -> None:
    raw, last = torch.tensor([[0.0, 3.0], [1.0, 1.0]]), torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    assert float(feature_loss(raw, last, torch.tensor([2.0, 1.0]))) == pytest.approx(2 * (0.125 + 2.5) / 2)


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle1"])
@pytest.mark.parametrize("kind", ["distribution", "regression", "hass"])
def test_objective_is_the_sum_that_the_paper_writes(algorithm: str, kind: str) -> None:
    """Σ_i 0.8^i Σ rows, over rows that an answer's token follows and whose best token the draft can say."""
    spec = spec_of(algorithm)
    fuse, draft = head_of(spec, scale=4)
    batch = batch_of(spec, lengths=[14, 19], prompts=[4, 7])
    ids = torch.arange(20)
    own = torch.full((VOCAB,), -1)
    own[ids] = ids
    lm_head = torch.randn(VOCAB, WIDTH)
    settings = TrainSettings(algorithm=algorithm, steps=3, loss=kind, top_tokens=5)
    outcome = Objective(fuse, draft, lm_head[ids], own, settings)(batch)

    found = unroll(fuse, draft, batch, 3)
    labels, valid = label_rows(batch, found.rows, 3)
    total = torch.zeros(())
    hits = [0, 0, 0]
    for step in range(3):
        table = draft.lm_head.weight if algorithm == "eagle3" else lm_head[ids]
        raw = draft.norm(found.raw[step]) if algorithm == "eagle3" else found.raw[step]
        log_q = (raw @ table.T).log_softmax(-1)
        for n in range(len(found.rows)):
            if not valid[step, n]:
                continue
            row = int(labels[step, n])
            last, best = batch.last.flatten(0, 1)[row], int(batch.best.flatten()[row])
            logits = lm_head[ids] @ last
            if kind == "hass":
                logits[logits < logits.topk(5).values[-1]] = -torch.inf
            hits[step] += int(log_q[n].argmax()) == best
            entropy = -(logits.softmax(-1) * log_q[n]).sum() if best < 20 else 0.0
            if kind == "distribution":
                total = total + 0.8**step * entropy
            else:
                distance = torch.nn.functional.smooth_l1_loss(found.raw[step][n], last)
                total = total + 0.8**step * (distance + 0.1 * entropy)
    torch.testing.assert_close(outcome.loss, total / len(found.rows), rtol=1e-4, atol=1e-4)
    assert outcome.hits.tolist() == hits
    assert outcome.rows.tolist() == valid.sum(1).tolist()


def test_prompts_and_padding_teach_nothing() -> None:
    """What stands there may change labels and best tokens at will: loss and gradient stay."""
    spec = spec_of()
    fuse, draft = head_of(spec, scale=4)
    assert fuse is not None
    batch = batch_of(spec, lengths=[14, 19], prompts=[4, 7])
    own = torch.arange(VOCAB).clamp(max=19)
    objective = Objective(fuse, draft, torch.randn(20, WIDTH), own, TrainSettings(steps=3))
    asked = torch.zeros_like(batch.answers)
    asked[:, :-1] = batch.answers[:, 1:]
    changed = replace(
        batch,
        last=torch.where(asked[..., None], batch.last, torch.full_like(batch.last, 7.0)),
        best=torch.where(asked, batch.best, 0),
        tokens=torch.where(torch.arange(19) < torch.tensor([[14], [19]]), batch.tokens, 5),
    )
    losses = [objective(x).loss for x in (batch, changed)]
    grads = [torch.autograd.grad(loss, [fuse.fc.weight, draft.lm_head.weight]) for loss in losses]
    assert losses[0] == losses[1]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
