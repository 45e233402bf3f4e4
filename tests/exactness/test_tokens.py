"""Lossless, token by token: every tree gives what plain decoding gives, and that is what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.decoding import Answer, Request, answers_of, request_of, run
from support.tiny import EOS, eager_engine, modules_of

from eagle_export.reference.modules import Modules
from eagle_run.decoding.tree import TreeShape, best_static
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.errors import EagleError, UsageError
from eagle_run.metrics import Metrics
from eagle_run.params import SamplingParams

PLAIN = TreeShape.plain()
SHAPES = {
    "dynamic": TreeShape.dynamic(3, 3, 10),
    "dynamic-deep": TreeShape.dynamic(5, 2, 8),
    "dynamic-one-level": TreeShape.dynamic(1, 4, 5),
    "static": TreeShape.static((-1, 0, 0, 0, 1, 1, 4, 2)),
    "static-best": best_static(4, 3, 12),
    "chain": TreeShape.chain(4),
    "chain-one": TreeShape.chain(1),
}
PROMPTS = ((7, 20, 33, 5, 61), tuple(range(10, 40)), (12,))
SEEDED = SamplingParams(temperature=1.0, seed=11)


def requests(count: int = 30, sampling: SamplingParams | None = None) -> list[Request]:
    return [
        Request(prompt, sampling or SamplingParams(temperature=0), max_new_tokens=count) for prompt in PROMPTS
    ]


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def slow_greedy(modules: Modules, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The obvious way: the whole sequence through Transformers for every token, no cache."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(modules.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.fixture(scope="module")
def tiny_modules(tiny_target: Path, tiny_head: Path) -> Modules:
    return modules_of(tiny_target, tiny_head)


@pytest.fixture(scope="module")
def good(tiny_modules: Modules) -> Engine:
    return eager_engine(tiny_modules, batch=3)


@pytest.fixture(scope="module")
def eagle1(tiny_target: Path, eagle1_head: Path) -> Engine:
    return eager_engine(modules_of(tiny_target, eagle1_head), batch=3)


@pytest.fixture(scope="module")
def ignorant(tiny_target: Path, random_head: Path) -> Engine:
    return eager_engine(modules_of(tiny_target, random_head), batch=3)


@pytest.fixture(scope="module")
def plain_answers(tiny_modules: Modules) -> list[tuple[int, ...]]:
    return tokens(answers_of(eager_engine(tiny_modules), requests(), PLAIN))


@pytest.fixture(scope="module")
def engine(built_bundle: Path) -> Engine:
    return load_engine(built_bundle, threads=1)


def test_plain_decoding_equals_transformers(
    tiny_modules: Modules, plain_answers: list[tuple[int, ...]]
) -> None:
    assert plain_answers == [slow_greedy(tiny_modules, prompt, 30) for prompt in PROMPTS]
    assert len(set(plain_answers[0])) > 5  # a model that repeats itself would prove nothing


@pytest.mark.parametrize("head", ["good", "ignorant", "eagle1"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_trees_equal_plain_decoding(
    head: str, shape: TreeShape, plain_answers: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    metrics = Metrics()
    engine = request.getfixturevalue(head)
    assert tokens(answers_of(engine, requests(), shape, metrics=metrics)) == plain_answers
    if head != "ignorant":  # the equality above says something only where drafts are accepted
        assert metrics.tokens_per_round > 1.2


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES.values()], ids=["plain", *SHAPES])
def test_onnx_runtime_equals_eager(
    shape: TreeShape, engine: Engine, plain_answers: list[tuple[int, ...]]
) -> None:
    assert tokens(answers_of(engine, requests(), shape)) == plain_answers


@pytest.mark.parametrize("name", ["dynamic", "dynamic-deep", "static", "chain"])
@pytest.mark.parametrize(
    "sampling",
    [
        SEEDED,
        SamplingParams(temperature=0.7, top_k=12, seed=3),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=4),
    ],
    ids=["plain", "top-k", "top-p"],
)
def test_a_seed_gives_the_same_tokens_with_and_without_a_tree(
    name: str, sampling: SamplingParams, good: Engine
) -> None:
    wanted = answers_of(good, requests(20, sampling), PLAIN)
    assert answers_of(good, requests(20, sampling), SHAPES[name]) == wanted
    assert tokens(wanted) != tokens(answers_of(good, requests(20, replace(sampling, seed=99)), PLAIN))


@pytest.mark.parametrize("shape", [SHAPES["static"], SHAPES["chain"]], ids=["static", "chain"])
def test_sampled_drafts_are_greedy_at_temperature_zero(
    shape: TreeShape, tiny_modules: Modules, plain_answers: list[tuple[int, ...]]
) -> None:
    assert tokens(answers_of(eager_engine(tiny_modules), requests(), shape, rule="sampled")) == plain_answers


MIXED = [
    Request(PROMPTS[0], SamplingParams(temperature=0), max_new_tokens=15),
    Request(PROMPTS[1], SEEDED, max_new_tokens=20),
    Request(PROMPTS[2], SamplingParams(temperature=0.8, top_p=0.9, seed=5), max_new_tokens=9),
    Request(tuple(range(50, 70)), SamplingParams(temperature=0.9, top_k=7, seed=6), max_new_tokens=20),
    Request((3,) * 17, SamplingParams(temperature=0), max_new_tokens=1),
]


@pytest.mark.parametrize(
    ("name", "rule"),  # sampled children need a fixed tree
    [("dynamic", "topk"), *((name, rule) for name in ("static", "chain") for rule in ("topk", "sampled"))],
)
def test_a_batch_gives_each_sequence_what_it_gives_alone(name: str, rule: str, tiny_modules: Modules) -> None:
    shape, alone = SHAPES[name], eager_engine(tiny_modules)
    wanted = [answers_of(alone, [request], shape, rule=rule)[0] for request in MIXED]
    for batch in (3, 5):  # five requests in batches of three: the last batch has an empty slot
        engine = eager_engine(tiny_modules, batch=batch)
        assert answers_of(engine, MIXED, shape, rule=rule) == wanted


def test_a_batch_on_onnx_runtime(built_bundle: Path, engine: Engine) -> None:
    shape = SHAPES["dynamic"]
    wanted = [answers_of(engine, [request], shape)[0] for request in MIXED]
    batch = load_engine(built_bundle, batch=3, threads=1)
    assert answers_of(batch, MIXED, shape) == wanted


@pytest.mark.parametrize("chunk", [1, 5, 8, 29, 30])
def test_chunks_do_not_show(chunk: int, tiny_modules: Modules, plain_answers: list[tuple[int, ...]]) -> None:
    metrics = Metrics()
    engine = eager_engine(tiny_modules, batch=3, chunk=chunk)
    answers = answers_of(engine, requests(), SHAPES["dynamic"], metrics=metrics)
    assert tokens(answers) == plain_answers
    whole = Metrics()
    answers_of(eager_engine(tiny_modules, batch=3, chunk=64), requests(), SHAPES["dynamic"], metrics=whole)
    assert metrics.reached == whole.reached  # the draft's cache was filled alike, too


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES.values()], ids=["plain", *SHAPES])
@pytest.mark.parametrize("room", [1, 2, 7])
def test_the_end_of_the_context_is_a_clean_end(
    shape: TreeShape, room: int, tiny_modules: Modules, plain_answers: list[tuple[int, ...]]
) -> None:
    prompt, wanted, most = PROMPTS[1], plain_answers[1], len(PROMPTS[1]) + room
    tight = max(16, shape.cache_rows)  # exactly what the engine asks for
    engine = eager_engine(tiny_modules, max_seq_len=most, extra_rows=tight)
    answer = answers_of(engine, [Request(prompt, max_new_tokens=60)], shape)[0]
    assert answer.tokens == wanted[:room]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("name", ["dynamic-deep", "static", "chain"])
def test_a_slot_at_the_end_of_the_context_does_not_disturb_the_others(
    name: str, eagle1: Engine, tiny_target: Path, eagle1_head: Path
) -> None:
    """The finished slot computes on, in lock-step: never at rows that the caches do not have."""
    shape, modules = SHAPES[name], modules_of(tiny_target, eagle1_head)
    (whole,) = answers_of(eagle1, [Request(PROMPTS[0], max_new_tokens=40)], PLAIN)
    short = Request(PROMPTS[0][:3], max_new_tokens=9)
    (wanted,) = answers_of(eagle1, [short], PLAIN)
    passed_the_end = 0
    for cut in range(20, 32):
        long = Request((*PROMPTS[0], *whole.tokens[:cut]), max_new_tokens=60)
        (alone,) = answers_of(
            eagle1, [replace(long, max_new_tokens=5)], shape, metrics=(metrics := Metrics())
        )
        passed_the_end += len(metrics.reached) > 2 and metrics.reached[2] > 0
        engine = eager_engine(
            modules, batch=2, max_seq_len=len(long.prompt) + 1, chunk=4, extra_rows=max(4, shape.cache_rows)
        )
        first, second = answers_of(engine, [long, short], shape)
        assert (first.tokens, first.finish_reason) == (alone.tokens[:1], "length")
        assert second == wanted
    assert passed_the_end  # rounds that emit more than there is room for: what this test is about


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_an_answer_is_cut_at_max_new_tokens(
    count: int, good: Engine, plain_answers: list[tuple[int, ...]]
) -> None:
    answers = answers_of(good, requests(count), SHAPES["dynamic"])
    assert tokens(answers) == [answer[:count] for answer in plain_answers]
    assert {answer.finish_reason for answer in answers} == {"length"}


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES.values()], ids=["plain", *SHAPES])
def test_a_stop_token_ends_the_answer_and_is_kept(
    shape: TreeShape, good: Engine, plain_answers: list[tuple[int, ...]]
) -> None:
    for place in (0, 4, 13):
        stops = [answer[place] for answer in plain_answers]
        stopping = [
            replace(request, stop_tokens=frozenset({stop}))
            for request, stop in zip(requests(), stops, strict=True)
        ]
        found = answers_of(good, stopping, shape)
        assert tokens(found) == [
            answer[: answer.index(stop) + 1] for answer, stop in zip(plain_answers, stops, strict=True)
        ]
        assert {answer.finish_reason for answer in found} == {"stop"}


def test_a_stop_string_ends_the_answer_before_it(engine: Engine) -> None:
    prompt = tuple(engine.tokenizer.encode_prompt("Hello you"))
    request = Request(prompt, max_new_tokens=40, stop_tokens=frozenset({EOS}))
    whole = answers_of(engine, [request], PLAIN)[0].text
    assert len(whole) > 12
    for stop in (whole[6:9], whole[3], whole[9:11]):
        stopping = replace(request, stop_strings=("never", stop))
        plain = answers_of(engine, [stopping], PLAIN)[0]
        for shape in (PLAIN, *SHAPES.values()):
            answer = answers_of(engine, [stopping], shape)[0]
            assert answer.text == whole[: whole.index(stop)]
            assert answer.finish_reason == "stop"
            assert answer.tokens == plain.tokens  # a round's tokens after the stop are not kept


def test_text_is_the_same_in_pieces(engine: Engine) -> None:
    request = Request(tuple(engine.tokenizer.encode_prompt("Count: 1, 2")), max_new_tokens=30)
    for shape in (PLAIN, *SHAPES.values()):
        answer = answers_of(engine, [request], shape)[0]
        assert answer.text == engine.tokenizer.decode(answer.tokens)


def refuses(engine: Engine, request: Request, shape: TreeShape, words: str) -> EagleError:
    with pytest.raises(EagleError, match=words) as caught:
        answers_of(engine, [request], shape)
    return caught.value


def test_what_cannot_be_decoded_is_refused(tiny_modules: Modules, tiny_target: Path) -> None:
    engine = eager_engine(tiny_modules, max_seq_len=32, extra_rows=16)
    refuses(engine, Request(()), PLAIN, "empty")
    refuses(engine, Request((5,) * 32), PLAIN, "32 tokens")
    assert refuses(engine, Request((5,), max_new_tokens=0), PLAIN, "max_tokens").exit_code == 2
    refuses(engine, Request((5, 10**6)), PLAIN, "token ids outside 0 to")
    refuses(engine, Request((5, -1)), PLAIN, "token ids outside 0 to")
    large = TreeShape.dynamic(4, 4, 40)
    assert isinstance(refuses(engine, Request((5,)), large, "cache rows"), UsageError)
    with pytest.raises(UsageError, match="prefill in chunks of 17 tokens needs 49 cache") as caught:
        eager_engine(tiny_modules, max_seq_len=32, chunk=17, extra_rows=16)
    assert "tree" not in str(caught.value)
    with pytest.raises(UsageError, match="sampled drafts need a tree that is fixed"):
        answers_of(engine, [Request((5,))], SHAPES["dynamic"], rule="sampled")
    small = eager_engine(tiny_modules, max_seq_len=32, extra_rows=16, max_tree_nodes=3)
    assert isinstance(refuses(small, Request((5,)), TreeShape.chain(3), "built for 3"), UsageError)
    headless = eager_engine(modules_of(tiny_target))
    refuses(headless, Request((5,)), SHAPES["chain"], "no draft head")


def test_without_a_head_plain_decoding_works(tiny_target: Path, plain_answers: list[tuple[int, ...]]) -> None:
    assert tokens(answers_of(eager_engine(modules_of(tiny_target)), requests(), PLAIN)) == plain_answers


REAL_PROMPTS = (
    "Give me two reasons to learn to cook.",
    "Write a Python loop that prints the squares of 1 to 5.",
    "A box holds 12 eggs. How many boxes are needed for 100 eggs?",
)


@pytest.mark.real
def test_smollm2_is_lossless(smollm2_bundle: Path) -> None:
    """Every shape against plain decoding, and plain decoding against Transformers, on real weights."""
    from eagle_export.reference.modules import reference_of
    from eagle_run.bench.mismatch import TIE, find_mismatch

    engine = load_engine(smollm2_bundle, threads=1)
    modules = reference_of(engine.bundle.manifest)
    shapes = [engine.default_tree, SHAPES["chain"], SHAPES["static"], TreeShape.dynamic(4, 4, 16)]
    for prompt in REAL_PROMPTS:
        greedy = request_of(engine, prompt, max_new_tokens=24)
        for request in (
            greedy,
            replace(greedy, sampling=SamplingParams(temperature=0.9, top_p=0.95, seed=21)),
        ):
            plain = run(engine, [request], PLAIN).token_ids[0]
            for shape in shapes:
                assert shape is not None
                found = run(engine, [request], shape).token_ids[0]
                fault = find_mismatch(engine, request.offline, plain, found)
                assert fault is None or fault.tie, (prompt, shape, fault)
        answer = run(engine, [greedy], PLAIN).token_ids[0]
        ids = torch.tensor([[*greedy.prompt, *answer]])
        with torch.no_grad():
            logits = modules.model(ids).logits[0, len(greedy.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float((logits.amax(1) - chosen).max()) <= TIE


def test_a_level_wider_than_the_bundle_was_built_for(tiny_modules: Modules) -> None:
    """Its rows fit no profile of an engine, though the tree that is kept of it may have few nodes."""
    engine = eager_engine(tiny_modules, max_tree_nodes=16)
    shape = TreeShape.dynamic(2, 20, 10)
    assert shape.nodes <= 16
    refuses(engine, Request((5,)), shape, "a level of this tree has 20 rows; the bundle was built for 16")
    assert answers_of(engine, [Request((5,), max_new_tokens=3)], TreeShape.dynamic(2, 16, 10))
