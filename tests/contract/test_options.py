"""Options and the dataclasses that they fill: every field has one, with the field's own default."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

import click
import click.testing
import pytest

from eagle_export.cli.main import cli
from eagle_export.cli.options import option_of
from eagle_export.data.settings import DataSettings
from eagle_export.pipeline.options import BuildOptions, EngineOptions, Fp8Options
from eagle_export.train.settings import TrainSettings

# Fields that are records of their own, whose fields have options.
NESTED = {"engine", "fp8"}
# Options that say more or less than their field: the default depends on others, or is written as text.
OWN_DEFAULT = {"backend", "precision", "self_play", "temperatures"}


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("build", BuildOptions),
        ("build", EngineOptions),
        ("build", Fp8Options),
        ("compile", EngineOptions),
        ("export", Fp8Options),
        ("data", DataSettings),
        ("train", TrainSettings),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_field_has_an_option_with_its_default(command: str, settings: type) -> None:
    values = cli.commands[command].make_context(command, [], resilient_parsing=True).params
    named = [field for field in fields(settings) if field.name not in NESTED]
    assert len(named) > 5
    for field in named:
        value = values[field.name]
        if field.name not in OWN_DEFAULT and field.default is not MISSING:
            assert (value or None) == (field.default or None), field.name


def test_an_option_is_spelled_like_its_field_unless_told() -> None:
    @dataclass(frozen=True)
    class Sizes:
        most_rows: int = 3
        parts: tuple[str, ...] = ()
        dry: bool = False
        name: str | None = None

    @click.command()
    @option_of(Sizes, "most_rows", "Rows.", type=int)
    @option_of(Sizes, "parts", "Parts.", "--part", "-p")
    @option_of(Sizes, "dry", None)
    @option_of(Sizes, "name", None)
    def measure(**values: object) -> None:
        click.echo(sorted(values.items()))

    assert [option.opts for option in measure.params] == [
        ["--most-rows"],
        ["--part", "-p"],
        ["--dry"],
        ["--name"],
    ]
    runner = click.testing.CliRunner()
    nothing = runner.invoke(measure, []).output
    assert nothing.strip() == "[('dry', False), ('most_rows', 3), ('name', None), ('parts', ())]"
    given = runner.invoke(measure, ["--most-rows", "4", "-p", "a", "--part", "b", "--dry"]).output
    assert given.strip() == "[('dry', True), ('most_rows', 4), ('name', None), ('parts', ('a', 'b'))]"
    with pytest.raises(ValueError, match="not enough values"):
        option_of(Sizes, "colour", None)
