"""Runs a click command line: output that any terminal takes, errors without tracebacks, exit codes."""

from __future__ import annotations

import _thread
import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import click

from eagle_run.errors import EagleError

_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def run_cli(
    group: click.Command,
    name: str,
    arguments: Sequence[str],
    *,
    interrupted: str = "",
    json_errors: bool = False,
) -> int:
    """Runs `group` as the program `name`; the exit code is 2 for usage, 130 for Ctrl-C, 1 for other errors.

    Errors are one line on stderr, and a hint; with --debug among the arguments the traceback goes before
    them. `interrupted` is what Ctrl-C prints, unless an Abort says more. json_errors: with --json among the
    arguments stdout gets what went wrong as an object, so that it holds one however the program ends.
    """
    as_json = json_errors and "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a terminal that lacks a character shows a ?
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with _no_interrupt_lost():
            code = group.main(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return _document(as_json, error.exit_code, error.format_message())
    except (KeyboardInterrupt, click.Abort) as error:
        exec("")  # an interrupt inside an exec() makes Python end by the signal; one that ends well undoes it
        if said := str(error) or interrupted:
            click.echo(said, err=True)
        return _document(as_json, _INTERRUPTED, said)
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        shown = _show(error, partial(_options, group, arguments))
        return _document(as_json, shown.exit_code, shown.message, shown.hint)


def _document(as_json: bool, exit_code: int, message: str, hint: str = "") -> int:
    """What went wrong, for a program that reads stdout. Returns the exit code."""
    if as_json:
        click.echo(json.dumps({"error": message, "hint": hint or None, "exit_code": exit_code}, indent=2))
    return exit_code


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """What Python drops, an interrupt in the middle of a `__del__`, is raised again."""
    before = sys.unraisablehook

    def again(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        heard = next((n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))), None)
        if heard is not None:  # a moment later: here it would be dropped once more
            timer = threading.Timer(0.05, _thread.interrupt_main, [heard])
            timer.daemon = True
            timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _show(error: Exception, options: Callable[[Sequence[str]], str]) -> EagleError:
    """Prints an error the way every error looks: what it is, then what to do, in this command's options."""
    if isinstance(error, OSError):
        error = _of_system(error)
    if not isinstance(error, EagleError):
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = EagleError(message, hint="run again with --debug, and report this")
    if names := options(error.parameters):
        error.hint = f"{error.hint} ({names})" if error.hint else f"see {names}"
    click.echo(f"error: {error}", err=True)
    return error


def _options(group: click.Command, arguments: Sequence[str], parameters: Sequence[str]) -> str:
    """What the command that ran calls these parameters: "--max-batch, --batch"."""
    commands = getattr(group, "commands", {})
    command = next((commands[word] for word in arguments if word in commands), group)
    known = {option.name: _spelling(option) for option in command.params}
    return ", ".join(known.get(name, f"--{name.replace('_', '-')}") for name in parameters)


def _spelling(parameter: click.Parameter) -> str:
    """How a parameter is written: its first long name, and what turns it off; an argument as in the usage."""
    if isinstance(parameter, click.Argument):
        return parameter.human_readable_name
    long = (name for name in parameter.opts if name.startswith("--"))
    return "/".join((next(long, parameter.opts[0]), *parameter.secondary_opts))


def _of_system(error: OSError) -> EagleError:
    """A failed read or write. A short write of NumPy's (of a graph's weights) carries no errno."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "written" in str(error)
    what = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    if full:
        return EagleError(
            f"{where}cannot be written: {what}" if where else f"a file cannot be written: {what}",
            hint="free some space on this disk, or write to another place",
        )
    return EagleError(f"{where}{what}", hint="check that the file is there and may be read and written")
