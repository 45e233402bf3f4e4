"""Fixtures of the contract tests."""

from __future__ import annotations

import pytest
from exportcli import Cli, Outcome

from eagle_export.cli import run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process."""

    def call(*arguments: object) -> Outcome:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
