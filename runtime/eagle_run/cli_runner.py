"""Runs a click command line: output that any terminal takes, errors without tracebacks, exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence

import click

from eagle_run.errors import EagleError

_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def run_cli(group: click.Command, name: str, arguments: Sequence[str], *, interrupted: str = "") -> int:
    """Runs `group` as the program `name`; the exit code is 2 for usage, 130 for Ctrl-C, 1 for other errors.

    Errors are one line on stderr, and a hint; with --debug among the arguments the traceback goes before
    them. `interrupted` is what Ctrl-C prints.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a terminal that lacks a character shows a ?
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = group.main(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        if interrupted:
            click.echo(interrupted, err=True)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        return _show(error)


def _show(error: Exception) -> int:
    """Prints an error the way every error looks: what it is, then what to do."""
    if isinstance(error, OSError):
        error = _of_system(error)
    if not isinstance(error, EagleError):
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = EagleError(message, hint="run again with --debug, and report this")
    click.echo(f"error: {error}", err=True)
    return error.exit_code


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
