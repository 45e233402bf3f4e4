"""The whole loop at T > 0 gives the target's own distribution: counted answers against enumerated ones.

A tiny target with 8 tokens; the joint distribution of the first 3 tokens after a prompt (512 outcomes) is
enumerated with Transformers, then some thousand answers, each with its own seed, are compared with it by
a chi-square test. Seeds are fixed, so a result here never changes by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from support.decoding import Request, answers_of
from support.tiny import Sizes, eager_engine, modules_of, write_head, write_target
from torch import Tensor

import eagle_run.engine.round
from eagle_export.reference.modules import Modules
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.metrics import Metrics
from eagle_run.params import SamplingParams

VOCAB, TOKENS, SLOTS, GROUPS = 8, 3, 2048, 2
# Prefill of thousands of slots takes longer than all of their rounds. A prompt of one token needs
# none: it is the first root.
PROMPT, ONE = (3, 1, 6, 2), (2,)
SIZES = Sizes(vocab=VOCAB, layers=3, hidden=16, heads=2, kv_heads=1, inner=24)
SHAPES = {
    "plain": TreeShape.plain(),
    "dynamic": TreeShape.dynamic(2, 3, 7),
    "static": TreeShape.static((-1, 0, 0, 0, 1, 1, 2)),
    "chain": TreeShape.chain(3),
}
SETTINGS = {
    "T=1": {"temperature": 1.0},
    "min-p": {"temperature": 1.4, "min_p": 0.15},
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Modules:
    folder = tmp_path_factory.mktemp("distribution")
    target = write_target(folder / "target", SIZES, seed=4)
    return modules_of(target, write_head(folder / "head", target, draft_vocab=6))


@pytest.fixture(scope="module")
def engine(modules: Modules) -> Engine:
    return eager_engine(modules, batch=SLOTS, max_seq_len=16, extra_rows=16)


def filtered(logits: Tensor, temperature: float, min_p: float = 0.0) -> Tensor:
    """Probabilities f64 [V], as the settings define them."""
    p = torch.softmax(logits.double() / temperature, -1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def enumerated(
    modules: Modules, settings: dict[str, Any], prompt: tuple[int, ...] = ONE
) -> dict[tuple[int, ...], float]:
    """Probability of each possible answer of TOKENS tokens, by Transformers' own forward."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        ids = torch.tensor([[*prompt, *answer] for answer in joint])
        with torch.no_grad():
            logits = modules.model(ids).logits[:, -1]
        joint = {
            (*answer, token): mass * float(p[token])
            for (answer, mass), p in zip(
                joint.items(), [filtered(row, **settings) for row in logits], strict=True
            )
            for token in range(VOCAB)
        }
    return joint


def counted(
    engine: Engine,
    settings: dict[str, Any],
    shape: TreeShape,
    rule: str,
    metrics: Metrics,
    *,
    prompt: tuple[int, ...] = ONE,
) -> Counter[tuple[int, ...]]:
    requests = [
        Request(prompt, SamplingParams(seed=1000 + i, **settings), max_new_tokens=TOKENS)
        for i in range(SLOTS * GROUPS)
    ]
    return Counter(
        answer.tokens for answer in answers_of(engine, requests, shape, rule=rule, metrics=metrics)
    )


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square test; outcomes expected fewer than 5 times are pooled, impossible ones must not occur."""
    total = sum(counts.values())
    assert not [answer for answer in counts if expected[answer] == 0.0]
    statistic, pooled_seen, pooled_mass, cells = 0.0, 0, 0.0, 0
    for answer, mass in expected.items():
        if mass * total < 5:
            pooled_seen += counts[answer]
            pooled_mass += mass
            continue
        statistic += (counts[answer] - mass * total) ** 2 / (mass * total)
        cells += 1
    if pooled_mass * total >= 5:
        statistic += (pooled_seen - pooled_mass * total) ** 2 / (pooled_mass * total)
        cells += 1
    assert cells > 30  # fewer would say little
    return float(chi2.sf(statistic, cells - 1))


TREES = [
    ("plain", "topk"),
    ("dynamic", "topk"),
    ("static", "topk"),
    ("static", "sampled"),
    ("chain", "sampled"),
]


@pytest.mark.parametrize(
    ("name", "rule", "setting", "prompt"),
    [
        *((*how, setting, ONE) for how in TREES for setting in SETTINGS),
        pytest.param("dynamic", "topk", "T=1", PROMPT, marks=pytest.mark.slow),
        pytest.param("static", "sampled", "min-p", PROMPT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loop_has_the_targets_distribution(
    *,
    name: str,
    rule: str,
    setting: str,
    prompt: tuple[int, ...],
    modules: Modules,
    engine: Engine,
) -> None:
    metrics, settings = Metrics(), SETTINGS[setting]
    counts = counted(engine, settings, SHAPES[name], rule, metrics, prompt=prompt)
    assert p_value(counts, enumerated(modules, settings, prompt)) > 1e-3
    if name != "plain":  # drafts were accepted and rejected, so both branches took part
        assert 0.15 < metrics.acceptance_by_depth[0] < 0.95


def test_seeds_give_the_answers_of_plain_decoding(engine: Engine) -> None:
    """With top-k drafts every one of these answers, not only their distribution, is plain decoding's."""
    requests = [
        Request(ONE, SamplingParams(temperature=1.0, seed=seed), max_new_tokens=6) for seed in range(SLOTS)
    ]
    wanted = answers_of(engine, requests, SHAPES["plain"])
    for name in ("dynamic", "static", "chain"):
        assert answers_of(engine, requests, SHAPES[name]) == wanted


def _uniform_q(tokens: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Children drawn from q, but accepted as if they had been drawn evenly."""
    return tokens, torch.full_like(q, 1 / q.shape[-1])


def _shifted(tokens: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Other children than were drawn."""
    return (tokens + 1) % q.shape[-1], q


@pytest.mark.parametrize("fault", [_uniform_q, _shifted])
def test_a_wrong_q_is_noticed(
    fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    modules: Modules,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above can fail: drafts that are not what the acceptance believes shift the distribution."""
    true = eagle_run.engine.round.sample_children
    monkeypatch.setattr(
        eagle_run.engine.round, "sample_children", lambda *arguments: fault(*true(*arguments))
    )
    counts = counted(engine, SETTINGS["T=1"], SHAPES["static"], "sampled", Metrics())
    assert p_value(counts, enumerated(modules, SETTINGS["T=1"])) < 1e-6


def test_another_temperature_is_noticed(modules: Modules, engine: Engine) -> None:
    counts = counted(engine, {"temperature": 0.9}, SHAPES["dynamic"], "topk", Metrics())
    assert p_value(counts, enumerated(modules, SETTINGS["T=1"])) < 1e-6


def test_enumeration_sums_to_one(modules: Modules) -> None:
    for settings in SETTINGS.values():
        joint = enumerated(modules, settings)
        assert set(joint) == set(product(range(VOCAB), repeat=TOKENS))
        assert sum(joint.values()) == pytest.approx(1.0)


def test_headless_target_too(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", SIZES, seed=4)
    modules = modules_of(target)
    engine = eager_engine(modules, batch=SLOTS, max_seq_len=16, extra_rows=16)
    counts = counted(engine, SETTINGS["T=1"], SHAPES["plain"], "topk", Metrics())
    assert p_value(counts, enumerated(modules, SETTINGS["T=1"])) > 1e-3
