"""Does verify notice a head that is read otherwise than it was trained? And never one that is read right?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny import build_bundle, modules_of
from support.trainset import answers_by, spec_of

from eagle_export.cli.main import run
from eagle_export.heads.load import LoadedHead
from eagle_export.heads.settings import UNSAID, HeadSettings
from eagle_export.models.head import Draft, build_head
from eagle_export.reference import recipe as recipes
from eagle_export.reference.modules import Modules, load_config, load_fitting_head
from eagle_export.train.init import random_weights
from eagle_export.train.objective import Objective
from eagle_export.train.settings import TrainSettings
from eagle_export.train.ttt import Batch
from eagle_export.verify.head_check import CLEAR, SIGNIFICANT, Measured, check_head, check_readings, readings

pytestmark = pytest.mark.slow  # heads are trained
PROMPT = 8
Answers = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def answers(learned: Path) -> Answers:
    """Answers that the head was not trained on."""
    rows = answers_by(learned, count=108, prompt=PROMPT, new=48)[96:]
    return [(row[:PROMPT], row[PROMPT:]) for row in rows]


@pytest.fixture(scope="module")
def whole(learned: Path, trained: Path) -> Modules:
    return modules_of(learned, trained)


def read_as(whole: Modules, learned: Path, head: Path, said: HeadSettings) -> Modules:
    found = recipes.resolve_target(str(learned))
    loaded = load_fitting_head(recipes.resolve_head(str(head), found), load_config(found, 64), said)
    parts = whole.model.get_input_embeddings(), whole.model.get_output_embeddings()
    fuse, draft = build_head(loaded, *(part.weight for part in parts))
    return replace(whole, fuse=fuse, draft=draft, draft_to_target=loaded.draft_to_target)


def test_a_head_that_is_read_right_is_not_accused(whole: Modules, answers: Answers) -> None:
    check, found = check_head(whole, answers)
    assert check.status == "ok", check
    assert found[0].choice == ""
    assert found[0].acceptance[0] > 0.5
    assert max(other.gain for other in found[1:]) < CLEAR
    assert "clearly better" in check.detail


@pytest.fixture(scope="module")
def featured(whole: Modules, learned: Path) -> Modules:
    """With a head that does not see tokens: all that it knows of the text comes through its features."""
    rows = torch.tensor(answers_by(learned, count=96, prompt=PROMPT, new=40)[:48])
    spec = spec_of(
        vocab_size=80,
        draft_vocab=80,
        hidden_size=48,
        target_hidden_size=48,
        head_dim=12,
        intermediate_size=64,
    )
    spec = replace(spec, feature_layers=(1, 2, 3))
    tensors = random_weights(spec, 0)
    tensors["midlayer.input_layernorm.weight"].zero_()
    parts = whole.model.get_input_embeddings(), whole.model.get_output_embeddings()
    loaded = LoadedHead(learned, spec, tensors, torch.arange(80))
    fuse, draft = build_head(loaded, *(part.weight for part in parts))
    assert fuse is not None
    draft.midlayer.input_layernorm.weight.requires_grad_(False)
    with torch.no_grad():
        out = whole.model.model(input_ids=rows, output_hidden_states=True)
        best = whole.model.get_output_embeddings()(out.last_hidden_state).argmax(-1)
    features = torch.cat([out.hidden_states[layer] for layer in spec.feature_layers], -1)
    answers = (torch.arange(rows.shape[1]) >= PROMPT).expand_as(rows)
    batch = Batch(rows, answers, features, out.last_hidden_state, best)
    objective = Objective(fuse, draft, parts[1].weight.detach(), torch.arange(80), TrainSettings(steps=2))
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(120):
        optimizer.zero_grad()
        objective(batch).loss.backward()
        optimizer.step()
    return replace(whole, fuse=fuse.eval(), draft=draft.eval(), draft_to_target=torch.arange(80))


def test_layers_that_are_off_by_one_are_noticed(featured: Modules, answers: Answers) -> None:
    assert featured.draft is not None
    check, found = check_head(featured, answers)
    assert check.status == "ok", (check, found)
    state, spec = featured.draft.state_dict(), replace(featured.draft.spec, feature_layers=(0, 1, 2))
    draft = Draft(spec)
    draft.load_state_dict(state)
    check, found = check_head(replace(featured, draft=draft), answers)
    assert check.status == "fail", (check, found)
    assert "read with head_layer_ids 1,2,3 they are" in check.detail


@pytest.mark.parametrize(
    ("said", "flag"),
    [
        (HeadSettings(norm_output=True), "head_set norm_output=false"),
        (HeadSettings(norm_before_residual=True), "head_set norm_before_residual=false"),
    ],
    ids=["norm_output", "norm_before_residual"],
)
def test_norms_in_another_place_are_noticed(  # noqa: PLR0917
    said: HeadSettings, flag: str, whole: Modules, learned: Path, trained: Path, answers: Answers
) -> None:
    check, found = check_head(read_as(whole, learned, trained, said), answers)
    assert check.status == "fail", (check, found)
    assert flag in check.detail
    best = max(found, key=lambda other: other.gain)
    assert sum(best.acceptance) > sum(found[0].acceptance)


def test_an_embedding_that_it_was_not_trained_with_is_noticed(whole: Modules, answers: Answers) -> None:
    """Some trainers wrote the embedding that they had started with in place of the target's."""
    assert whole.draft is not None
    state = whole.draft.state_dict()
    state["embed_tokens.weight"] = torch.randn(state["embed_tokens.weight"].shape)
    draft = Draft(replace(whole.draft.spec, own_embedding=True))
    draft.load_state_dict(state)
    check, _ = check_head(replace(whole, draft=draft.eval()), answers)
    assert check.status == "fail", check
    assert "read with the target's embedding, without embed_tokens.weight" in check.detail


def test_an_untrained_head_has_no_better_reading(whole: Modules, learned: Path, answers: Answers) -> None:
    from support.tiny import write_head

    random = write_head(learned.parent / "untrained", learned, good=False, layer_ids=(0, 1, 2))
    check, _ = check_head(read_as(whole, learned, random, UNSAID), answers)
    assert check.status == "ok", check


def test_readings_are_those_that_fit() -> None:
    plain = spec_of(feature_layers=(2, 4, 5))
    choices = [reading.choice for reading in readings(plain, layers=8, target_theta=500000.0)]
    assert choices == [
        "",
        "head_layer_ids 1,3,4",
        "head_layer_ids 3,5,6",
        "head_set norm_output=true",
        "head_set norm_before_residual=true",
        "head_set norm_hidden_twice=true",
        "head_set rope_theta=500000",
    ]
    scaled = replace(plain, feature_layers=(0, 3, 7), rope_theta=5e5, rope_scaling={"rope_type": "yarn"})
    choices = [reading.choice for reading in readings(scaled, layers=8, target_theta=5e5)]
    assert "head_layer_ids 2,4,5" in choices  # what a head without ids means; one lower does not fit
    assert "head_layer_ids 1,4,9" in choices  # one higher: 9 is the last layer's output before the norm
    assert choices[-2:] == ["head_set rope_theta=10000", "head_set rope_scaling=none"]
    assert [reading.choice for reading in readings(spec_of("eagle1"), layers=3)] == [""]
    for ids, others in (((2, 4, 9), {"1,3,7", "2,4,5", "2,4,8"}), ((2, 4, 8), {"1,3,7", "2,4,5", "2,4,9"})):
        choices = [reading.choice for reading in readings(replace(plain, feature_layers=ids), layers=8)]
        assert {choice.split()[1] for choice in choices if "layer_ids" in choice} == others
    last = replace(plain, has_fc=False, feature_layers=(8,))
    assert not any("layer_ids" in reading.choice for reading in readings(last, layers=8))


def measured(choice: str, gain: float, z: float) -> Measured:
    return Measured(choice, (0.5, 0.4), 1000, gain - 2.0, gain, z)


@pytest.mark.parametrize(
    ("gain", "z", "status"),
    [
        (CLEAR, SIGNIFICANT, "fail"),
        (CLEAR * 0.9, SIGNIFICANT + 3, "ok"),  # better, but hardly
        (CLEAR * 5, SIGNIFICANT - 0.1, "ok"),  # may be chance
        (-1.0, -9.0, "ok"),
    ],
)
def test_where_the_line_is(gain: float, z: float, status: str) -> None:
    worse = measured("head_layer_ids 1", -3.0, -20.0)
    check = check_readings([measured("", 0.0, 0.0), worse, measured("-x", gain, z)])
    assert check.status == status
    assert ("read with -x" in check.detail) is (status == "fail")


def test_nothing_to_measure_is_no_fault(whole: Modules) -> None:
    assert check_readings([]).status == "ok"
    check, found = check_head(whole, [([4, 5], [6])])
    assert (check.status, found) == ("ok", [])
    assert check_readings([measured("", 0.0, 0.0)]).status == "ok"


def test_the_modules_are_left_as_they_were(whole: Modules, answers: Answers) -> None:
    assert whole.draft is not None
    before = {name: tensor.clone() for name, tensor in whole.draft.state_dict().items()}
    spec = whole.draft.spec
    check_head(whole, answers[:1])
    assert whole.draft.spec == spec
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole.draft.state_dict().items())


@pytest.mark.parametrize("wrong", [False, True])
def test_verify_says_which_option_reads_a_head_right(
    wrong: bool, learned: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, object] = {"head_set": ("norm_before_residual=true",)}
    bundle = build_bundle(learned, trained, tmp_path / "bundle", **(said if wrong else {}))
    settings = json.loads((bundle / "manifest.json").read_text())["head"]["settings"]
    assert settings == (["norm_before_residual=true"] if wrong else [])
    capsys.readouterr()
    code = run(["verify", str(bundle), "--limit", "8", "--threads", "1", "--json"])
    said_of_it = capsys.readouterr()
    result = json.loads(said_of_it.out)
    assert ("hint: its answers are right" in said_of_it.err) is wrong
    assert "do not use" not in said_of_it.err
    checks = {check["name"]: check for check in result["checks"]}
    failed = {name for name, check in checks.items() if check["status"] == "fail"}
    assert failed == ({"head: reading"} if wrong else set())  # the graphs are what they were built to be
    assert code == int(wrong)
    assert ("head_set norm_before_residual=false" in checks["head: reading"]["detail"]) is wrong
    assert result["readings"][0]["reading"] == "the bundle's own"
    assert len(result["readings"]) > 3
