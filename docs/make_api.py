"""Writes docs/api.md from the signatures and docstrings of what `eagle_run` exports.

python docs/make_api.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "runtime/eagle_run"
INTRODUCTION = """\
# Python API

`from eagle_run import NAME` gives each of the classes below. Nothing else of `eagle_run` is an interface:
other modules may change in any version. This page is made from the code by `python docs/make_api.py`.
"""
OPTIONS_OF = {"LLM": "open_engine"}  # a class whose **options are the arguments of a function of its module
_WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef


def render() -> str:
    """The whole page."""
    homes = _literal(PACKAGE / "__init__.py", "_HOMES")
    return "\n".join([INTRODUCTION, *(_section(name, home) for name, home in homes.items())])


def _section(name: str, home: str) -> str:
    path = PACKAGE / (home.replace(".", "/") + ".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    definitions = {node.name: node for node in body if isinstance(node, ast.ClassDef | Function)}
    class_ = definitions[name]
    assert isinstance(class_, ast.ClassDef)
    parts = [f"## {name}", f"`{path.relative_to(ROOT / 'runtime')}`", *_class_parts(class_)]
    if name in OPTIONS_OF:
        options = definitions[OPTIONS_OF[name]]
        assert isinstance(options, Function)
        parts += [f"### {options.name}", _code(_signature(options, options.name)), _doc(options)]
    for method in class_.body:
        if isinstance(method, Function) and not method.name.startswith("_"):
            parts += _method_parts(name, method)
    return "\n\n".join(part for part in parts if part) + "\n"


def _class_parts(class_: ast.ClassDef) -> Iterator[str]:
    """How one is made, and what it is: a constructor, the fields of a dataclass, or the values of an enum."""
    fields = [node for node in class_.body if isinstance(node, ast.AnnAssign)]
    values = [ast.unparse(node) for node in class_.body if isinstance(node, ast.Assign)]
    for node in class_.body:
        if isinstance(node, Function) and node.name == "__init__":
            yield _code(_signature(node, class_.name))
    if fields or values:
        yield _code("\n".join([*map(_field, fields), *values]))
    yield _doc(class_)


def _field(node: ast.AnnAssign) -> str:
    """As it is written, but for what a factory makes: `name: type = list()`."""
    text = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    if isinstance(node.value, ast.Call):
        (factory,) = (word.value for word in node.value.keywords if word.arg == "default_factory")
        return f"{text} = {ast.unparse(factory)}()"
    return text if node.value is None else f"{text} = {ast.unparse(node.value)}"


def _method_parts(owner: str, method: Function) -> Iterator[str]:
    kinds = {ast.unparse(decorator) for decorator in method.decorator_list}
    yield f"### {owner}.{method.name}"
    if kinds & {"property", "cached_property"}:
        assert method.returns is not None
        yield _code(f"{method.name}: {ast.unparse(method.returns)}")
    else:
        yield _code(_signature(method, method.name))
    yield _doc(method)


def _signature(function: Function, name: str) -> str:
    """On one line, or one argument a line where that is too long. Without self and cls."""
    arguments = list(_arguments(function.args))
    start = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    end = "" if function.returns is None or name[0].isupper() else f" -> {ast.unparse(function.returns)}"
    line = f"{start}{name}({', '.join(arguments)}){end}"
    if len(line) <= _WIDTH:
        return line
    return f"{start}{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){end}"


def _arguments(args: ast.arguments) -> Iterator[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(positional, defaults, strict=True):
        if arg.arg not in ("self", "cls"):
            yield _argument(arg, default)
    if args.vararg:
        yield f"*{ast.unparse(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(arg, default)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + ("" if default is None else f" = {ast.unparse(default)}")


def _code(text: str) -> str:
    return "```python\n" + text.replace("'", '"') + "\n```"


def _doc(node: ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _literal(path: Path, name: str) -> dict[str, str]:
    """The value of a dict that a module writes out."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            value: dict[str, str] = ast.literal_eval(node.value)
            return value
    raise LookupError(f"{path} has no {name}")


if __name__ == "__main__":
    (ROOT / "docs/api.md").write_text(render(), encoding="utf-8")
