"""What is measured of a precision is what the slow, obvious computation says."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import Request
from support.tiny import EOS, modules_of, write_target

from eagle_export.progress import Progress
from eagle_export.reference.modules import Modules, eager_graphs
from eagle_export.verify.accuracy import choose_requests, measure, runnable_graphs
from eagle_run.bundle.manifest import Limits
from eagle_run.bundle.records import AccuracyInfo
from eagle_run.decoding.tree import TreeShape
from eagle_run.errors import EagleError
from eagle_run.tokenizer import Tokenizer

TREE = TreeShape.dynamic(3, 3, 8)
LIMITS = Limits(
    max_seq_len=96,
    max_batch=2,
    prefill_chunk=16,
    max_tree_nodes=32,
    cache_rows=160,
    draft_cache_rows=160,
)
# A common beginning of two tokens, a common end of one; one prompt is longer than a chunk.
PROMPTS = ((7, 8, 20, 33, 5, 3), (7, 8, *range(10, 40), 3), (7, 8, 12, 3))
OWN = [3, 30, 1]  # tokens of each that are its own
REQUESTS = [Request(prompt, max_new_tokens=20, stop_tokens=frozenset({EOS})).offline for prompt in PROMPTS]


@pytest.fixture(scope="module")
def modules(tiny_target: Path, tiny_head: Path) -> Modules:
    return modules_of(tiny_target, tiny_head)


def changed(modules: Modules, change: Callable[[Modules], None]) -> Modules:
    copied = copy.deepcopy(modules)
    with torch.no_grad():
        change(copied)
    return copied


def noisy(modules: Modules) -> None:
    weight = modules.target.model.lm_head.weight
    weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def measured(found: Modules, modules: Modules, **options: Any) -> AccuracyInfo:
    options = {"limits": LIMITS, "tree": TREE, **options}
    return measure(eager_graphs(found, 160), modules, REQUESTS, Progress(quiet=True), **options)


def slow(found: Modules, modules: Modules) -> tuple[int, float, float, float, float]:
    """tokens, top-1 agreement, KL and both perplexities, token by token with Transformers' own forwards."""
    agreed, kl, nll = [], [], ([], [])  # type: ignore[var-annotated]
    for prompt, own in zip(PROMPTS, OWN, strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            while len(ids) < len(prompt) + 20 and ids[-1] != EOS:
                ids.append(int(modules.model(torch.tensor([ids])).logits[0, -1].argmax()))
            here, there = (m.model(torch.tensor([ids])).logits[0].double() for m in (found, modules))
        for place in (*range(2, 2 + own), *range(len(prompt), len(ids))):
            q, p = here[place - 1].softmax(-1), there[place - 1].softmax(-1)
            agreed.append(float(q.argmax() == p.argmax()))
            kl.append(float((p * (p / q).log()).sum()))
            for side, probabilities in zip(nll, (q, p), strict=True):
                side.append(-float(probabilities[ids[place]].log()))
    count = len(agreed)
    one, two = (math.exp(sum(side) / count) for side in nll)
    return count, sum(agreed) / count, sum(kl) / count, one, two


def test_a_precision_that_costs_nothing_costs_nothing(modules: Modules) -> None:
    info = measured(modules, modules)
    assert info.top1_agreement == 1
    assert info.kl == pytest.approx(0, abs=1e-9)
    assert info.perplexity == pytest.approx(info.reference_perplexity)
    assert info.tokens_per_round == info.reference_tokens_per_round
    assert info.tokens_per_round > 1.2
    assert info.prompts == 3


def test_what_is_measured_is_what_the_slow_way_says(modules: Modules) -> None:
    found = changed(modules, noisy)
    info = measured(found, modules)
    tokens, top1, kl, perplexity, reference_perplexity = slow(found, modules)
    assert info.tokens == tokens
    assert info.top1_agreement == top1
    assert 0.5 < top1 < 1
    assert info.kl == pytest.approx(kl, rel=1e-4)
    assert info.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert info.reference_perplexity == pytest.approx(reference_perplexity, rel=1e-4)
    assert info.perplexity > info.reference_perplexity


def test_a_worse_draft_shows_in_tokens_per_round_alone(modules: Modules) -> None:
    def spoil(copied: Modules) -> None:
        assert copied.draft is not None
        copied.draft.midlayer.self_attn.o_proj.weight *= -1

    info = measured(changed(modules, spoil), modules)
    assert info.top1_agreement == 1
    assert info.tokens_per_round is not None
    assert info.reference_tokens_per_round is not None
    assert info.tokens_per_round < 0.9 * info.reference_tokens_per_round


def test_without_a_head_there_are_no_rounds(modules: Modules) -> None:
    plain = Modules(modules.model, modules.target, None, None, None)
    graphs = {"target": eager_graphs(modules, 160)["target"]}
    report = Progress(quiet=True)
    info = measure(graphs, plain, REQUESTS, report, limits=LIMITS, tree=None, backend="eager")
    assert (info.tokens_per_round, info.reference_tokens_per_round) == (None, None)
    assert info.tokens == measured(modules, modules).tokens
    assert info.backend == "eager"


def test_a_single_prompt_is_compared_from_its_second_token_on(modules: Modules) -> None:
    request = Request(PROMPTS[0], max_new_tokens=5).offline
    info = measure(
        eager_graphs(modules, 160), modules, [request], Progress(quiet=True), limits=LIMITS, tree=TREE
    )
    assert info.tokens == len(PROMPTS[0]) - 1 + 5


def test_answers_end_where_the_context_does(modules: Modules) -> None:
    limits = LIMITS.model_copy(update={"max_seq_len": 40})
    assert measured(modules, modules, limits=limits).tokens == sum(OWN) + 20 + 7 + 20


def test_a_prompt_beyond_the_context_is_refused(modules: Modules) -> None:
    with pytest.raises(EagleError, match="33 tokens"):
        measured(modules, modules, limits=LIMITS.model_copy(update={"max_seq_len": 33}))


# --- prompts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tiny_target: Path) -> Tokenizer:
    return Tokenizer.load(tiny_target)


def test_our_own_prompts_are_those_that_fit(text: Tokenizer) -> None:
    everything = choose_requests(text, (EOS,), max_seq_len=1000)
    assert len(everything) >= 20
    some = choose_requests(text, (EOS,), max_seq_len=60, max_tokens=5)
    assert 0 < len(some) < len(everything)
    assert all(len(request.prompt_token_ids) < 60 for request in some)
    assert some[0].params.max_tokens == 5
    assert some[0].params.stop_token_ids == (EOS,)
    assert some[0].params.temperature == 0
    assert len(choose_requests(text, (), max_seq_len=1000, limit=3)) == 3
    with pytest.raises(EagleError, match="context of 10 tokens is too short") as caught:
        choose_requests(text, (), max_seq_len=10)
    assert caught.value.parameters == ("prompts",)


def test_prompts_of_a_file_are_all_taken(text: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    said = ["Hello you", "Count to 7", "x" * 500]
    file.write_text("\n".join(json.dumps({"turns": [turn, "later"]}) for turn in said))
    found = choose_requests(text, (), max_seq_len=50, questions=file)
    assert [list(request.prompt_token_ids) for request in found] == [
        text.encode_prompt(turn) for turn in said
    ]
    assert len(choose_requests(text, (), max_seq_len=50, questions=file, limit=2)) == 2


def test_bfloat16_is_run_by_its_modules(modules: Modules, tmp_path: Path) -> None:
    graphs, backend = runnable_graphs({"target": tmp_path / "not read"}, modules, "bf16", 64)
    assert backend == "eager"
    assert set(graphs) == {"target", "fuse", "draft"}
    with pytest.raises(EagleError, match="ONNX Runtime"):
        runnable_graphs({"target": tmp_path / "not there"}, modules, "fp8", 64)


def test_another_target_is_far_off(modules: Modules, tiny_head: Path, tmp_path: Path) -> None:
    other = modules_of(write_target(tmp_path / "other", seed=9), tiny_head)
    info = measured(other, modules)
    assert info.top1_agreement < 0.5
    assert info.kl > 0.5
