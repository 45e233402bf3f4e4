"""Fixtures of the contract tests."""

from __future__ import annotations

import pytest
from support.exportcli import Cli, Outcome

from eagle_export.cli.main import run as run_export
from eagle_run.cli.main import run as run_eagle


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line of eagle-export in this process."""

    def call(*arguments: object) -> Outcome:
        code = run_export([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def eagle_run(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line of eagle-run in this process; what libraries write to the streams is seen too."""

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = run_eagle([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
