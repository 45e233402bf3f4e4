"""EagleError: what went wrong, what to do about it, and the exit code that a command line ends with."""

from __future__ import annotations

from collections.abc import Sequence


class EagleError(Exception):
    """An error that a user can act on.

    `message` says what was expected and what was found; `hint` says what to do. Both are in the words of the
    Python API: `parameters` names the arguments that could be changed ("max_batch"), and a command line adds
    what its options for them are called. `exit_code` is 2 for wrong arguments and 1 for everything else.
    Command lines print it without a traceback.
    """

    def __init__(
        self, message: str, *, hint: str = "", parameters: Sequence[str] = (), exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.parameters = tuple(parameters)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(EagleError):
    """An option or argument that makes no sense (exit code 2)."""

    def __init__(self, message: str, *, hint: str = "", parameters: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint, parameters=parameters, exit_code=2)


def as_eagle_error(error: BaseException) -> EagleError:
    """The error itself, or one that names a foreign error and keeps it as its cause."""
    if isinstance(error, EagleError):
        return error
    known = EagleError(f"{type(error).__name__}: {first_line(error)}")
    known.__cause__ = error
    return known


def first_line(error: BaseException) -> str:
    """What a foreign error says, in one line; its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
