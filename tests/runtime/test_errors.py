"""Errors, and the one way that a command line ends with them."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import click
import pytest

from eagle_run.cli.runner import run_cli
from eagle_run.errors import EagleError, UsageError, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "one"),
        (ValueError("\n  one\ntwo\n"), "one"),
        (ValueError(""), "ValueError"),
        (KeyError(), "KeyError"),
        (OSError(" \n "), "OSError"),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_the_hint_follows_the_message() -> None:
    assert str(EagleError("bad", hint="mend it")) == "bad\nhint: mend it"
    assert str(EagleError("bad")) == "bad"
    assert (EagleError("bad").exit_code, UsageError("bad").exit_code) == (1, 2)


def program(end: BaseException | int | None) -> click.Group:
    @click.group()
    def group() -> None:
        pass

    @group.command()
    @click.option("--debug", is_flag=True)
    def work(debug: bool) -> None:
        click.echo("out")
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            click.get_current_context().exit(end)

    return group


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (EagleError("bad", hint="mend it"), 1, "error: bad\nhint: mend it\n"),
        (UsageError("odd"), 2, "error: odd\n"),
        (click.UsageError("odd"), 2, "Error: odd\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out.json"),
            1,
            "error: out.json: cannot be written: No space left on device\n"
            "hint: free some space on this disk, or write to another place\n",
        ),
        (
            OSError("19200 requested and 8448 written"),
            1,
            "error: a file cannot be written: 19200 requested and 8448 written\n"
            "hint: free some space on this disk, or write to another place\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "b"),
            1,
            "error: b: Permission denied\nhint: check that the file is there and may be read and written\n",
        ),
        (ValueError("deep"), 1, "error: ValueError: deep\nhint: run again with --debug, and report this\n"),
        (ValueError(), 1, "error: ValueError\nhint: run again with --debug, and report this\n"),
    ],
)
def test_how_a_command_line_ends(
    capfd: pytest.CaptureFixture[str], end: BaseException | int | None, code: int, words: str
) -> None:
    assert run_cli(program(end), "tool", ["work"], interrupted="stopped") == code
    out, err = capfd.readouterr()
    assert out == "out\n"
    assert err.endswith(words)
    assert "Traceback" not in err
    assert bool(err) == bool(words)


@pytest.mark.parametrize("error", [EagleError("bad"), ValueError("deep")])
def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str], error: Exception) -> None:
    assert run_cli(program(error), "tool", ["work", "--debug"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert f"error: {error}" in err or "error: ValueError: deep" in err


def test_a_wrong_command_line_names_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_cli(program(None), "tool", ["play"]) == 2
    assert "Usage: tool" in capfd.readouterr().err


_LOST = """
import os, signal, sys, time
import click
from eagle_run.cli.runner import run_cli

class Cleaned:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the interrupt is raised here, and dropped
            pass

@click.command()
def work():
    {how}
    for _ in range(200):  # it is raised between two steps, not in the middle of one
        time.sleep(0.1)
    print("went on")

sys.exit(run_cli(work, "tool", [], interrupted="stopped"))
"""


@pytest.mark.parametrize(
    "how",
    ["Cleaned()", "exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')"],
    ids=["del", "exec"],
)
def test_an_interrupt_is_never_lost_and_always_the_same_exit_code(how: str) -> None:
    """Raised in a `__del__` Python drops it; raised in an exec() Python ends by the signal, not with 130."""
    program = [sys.executable, "-c", _LOST.format(how=how)]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done
    assert done.stdout == ""
    assert done.stderr.split() == ["stopped"]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (EagleError("bad", hint="mend it"), {"error": "bad", "hint": "mend it", "exit_code": 1}),
        (UsageError("odd"), {"error": "odd", "hint": None, "exit_code": 2}),
        (click.UsageError("odd"), {"error": "odd", "hint": None, "exit_code": 2}),
        (KeyboardInterrupt(), {"error": "stopped", "hint": None, "exit_code": 130}),
        (click.Abort("stopped; run again"), {"error": "stopped; run again", "hint": None, "exit_code": 130}),
        (
            ValueError(),
            {"error": "ValueError", "hint": "run again with --debug, and report this", "exit_code": 1},
        ),
    ],
)
def test_with_json_an_error_is_a_document_too(
    capfd: pytest.CaptureFixture[str], end: BaseException, expected: dict[str, object]
) -> None:
    @click.command()
    @click.option("--json", is_flag=True)
    def work(**_: object) -> None:
        raise end

    code = run_cli(work, "tool", ["--json"], interrupted="stopped", json_errors=True)
    out, err = capfd.readouterr()
    assert json.loads(out) == {**expected, "exit_code": code}
    assert str(expected["error"]) in err
    for arguments, wanted in ((["--json"], False), ([], True)):
        assert run_cli(work, "tool", arguments, interrupted="stopped", json_errors=wanted) == code
        assert capfd.readouterr().out == ""


@click.group()
def bakery() -> None: ...


@bakery.command()
@click.option("--rolls", "-r", "count", type=int)
@click.option("--dark", "--well-done", "dark", is_flag=True)
@click.option("--salt/--no-salt", default=True)
@click.argument("oven", required=False)
def bake(count: int, **_: object) -> None:
    parameters = ["count", "max_batch"] if count > 6 else ["dark", "salt", "oven"]
    raise UsageError(f"{count} rolls are too many", hint="ask for fewer", parameters=parameters)


def test_a_command_line_adds_what_it_calls_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    """The library speaks of parameters; only the command line has options."""
    assert run_cli(bakery, "bakery", ["bake", "-r", "9"]) == 2
    lines = ["error: 9 rolls are too many", "hint: ask for fewer (--rolls, --max-batch)"]
    assert capsys.readouterr().err.splitlines() == lines
    assert run_cli(bakery, "bakery", ["bake", "-r", "5"]) == 2
    assert "ask for fewer (--dark, --salt/--no-salt, OVEN)" in capsys.readouterr().err
    assert "--" not in str(UsageError("too many", hint="fewer", parameters=["count"]))
