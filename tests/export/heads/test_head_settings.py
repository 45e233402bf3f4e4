"""`--head-set`: what a person says of a head, over what its checkpoint says."""

from __future__ import annotations

import pytest
from support.trainset import spec_of

from eagle_export.heads.settings import UNSAID, HeadSettings, parse_settings
from eagle_export.pipeline.options import BuildOptions
from eagle_run.errors import EagleError, UsageError

ALL = HeadSettings(
    rope_theta=500000.0,
    rope_scaling="none",
    norm_output=False,
    norm_before_residual=True,
    norm_hidden_twice=True,
)


def test_texts_are_read_back() -> None:
    assert parse_settings(()) == UNSAID
    assert parse_settings(ALL.texts()) == ALL
    assert "norm_output=false" in ALL.texts()
    for theta in (10000.0, 1234567.25, 1e6):
        assert parse_settings(HeadSettings(rope_theta=theta).texts()).rope_theta == theta


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("norm_outptu=true", "--head-set knows norm_output, "),
        ("norm_output", "norm_output should be true or false, found ''"),
        ("norm_output=1", "true or false, found '1'"),
        ("rope_theta=-1", "positive number, found '-1'"),
        ("rope_theta=inf", "positive number"),
        ("rope_theta=many", "positive number, found 'many'"),
        ("rope_scaling=yarn", "rope_scaling can only be none"),
        ("layer_ids=1", "--head-set knows"),
        ("", "--head-set knows"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_settings([text])
    assert words in error.value.message


def test_said_once() -> None:
    with pytest.raises(UsageError, match="gives norm_output twice"):
        parse_settings(["norm_output=true", "norm_output=false"])


def test_a_person_goes_over_a_recipe() -> None:
    said, recipe = HeadSettings(norm_output=False), HeadSettings(norm_output=True, rope_theta=1e4)
    assert said.over(recipe) == HeadSettings(norm_output=False, rope_theta=1e4)
    assert UNSAID.over(recipe) == recipe


def test_applied_to_a_spec() -> None:
    spec = ALL.apply(spec_of(rope_scaling={"rope_type": "yarn"}, norm_output=True))
    assert (spec.rope_scaling, spec.rope_theta, spec.norm_output) == ({}, 500000.0, False)
    assert spec.norm_before_residual
    assert spec.norm_hidden_twice
    assert HeadSettings(rope_theta=5.0).apply(spec_of("eagle1")).rope_theta == 5.0
    with pytest.raises(EagleError, match="norm_output is set for an EAGLE-1 head"):
        HeadSettings(norm_output=True).apply(spec_of("eagle1"))


def test_options_are_checked_before_anything_else() -> None:
    with pytest.raises(UsageError, match="--head-set knows"):
        BuildOptions("x", head_set=("nothing=1",)).check()
    with pytest.raises(UsageError, match="--head none has no head"):
        BuildOptions("x", head="none", head_set=("norm_output=true",)).check()
    options = BuildOptions("x", head_set=("norm_output=true",), head_layer_ids=(1, 2))
    assert options.head_settings == HeadSettings(norm_output=True, layer_ids=(1, 2))
