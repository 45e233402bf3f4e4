"""Library code speaks the words of the Python API: only command lines have options.

An EagleError names `parameters`, and the command line that shows it adds what its own options are called. A
message, hint or docstring outside cli/ that says `--out` is wrong for everyone who calls the function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "eagle_export", ROOT / "runtime/eagle_run")
OPTION = re.compile(r"(?<![\w-])--(?:[a-z][\w-]*|\{\})")
# A whole command that the user should run has options of its own; it ends where the quotation does.
COMMAND = re.compile(r"`?\b(?:eagle-export|eagle-run|pip|python|hf) [^`;\n]*")
OTHER_PROGRAMS = ("--query-gpu", "--format")  # arguments that we run nvidia-smi with


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a module, docstrings too; {} where an f-string has a value."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def options_in(source: str) -> list[tuple[int, str]]:
    """Options that the strings of a module name outside of whole commands, each with its line."""
    return [
        (line, option)
        for line, text in texts(ast.parse(source))
        for option in OPTION.findall(COMMAND.sub("", text))
        if option not in OTHER_PROGRAMS
    ]


def library_modules() -> list[Path]:
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    return [path for path in paths if "cli" not in path.parts]


def test_no_library_module_names_an_option() -> None:
    modules = library_modules()
    assert len(modules) > 100
    named = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path in modules
        for line, option in options_in(path.read_text(encoding="utf-8"))
    ]
    assert not named, "name the parameter instead:\n" + "\n".join(named)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ('raise EagleError("no place", hint="choose one with --out")', ["--out"]),
        ('raise EagleError(f"--batch {n} is too much")', ["--batch"]),
        ('def f():\n    """What `--head` takes."""', ["--head"]),
        ('hint = "run `eagle-export build` and give --head"', ["--head"]),
        ('hint = f"say where with --{part}"', ["--{}"]),
        ('hint = "run `eagle-export compile BUNDLE --backend tensorrt` there"', []),
        ('hint = "pip install --upgrade eagle-export"', []),
        ('hint = f"run `pip install --no-deps {name}`; or --out"', ["--out"]),
        ('text = "a -- b, three --- dashes, a-b--c"', []),
    ],
)
def test_the_check_sees_options_and_lets_whole_commands_be(source: str, options: list[str]) -> None:
    assert [option for _, option in options_in(source)] == options
