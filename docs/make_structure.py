"""Writes the lists of layers and modules in docs/structure.md from their own first sentences.

python docs/make_structure.py
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"eagle_run": ROOT / "runtime/eagle_run", "eagle_export": ROOT / "eagle_export"}


def modules(package: Path) -> str:
    """A table: each module under `package` and the first paragraph of its docstring."""
    rows = ["| module | what it is |", "| --- | --- |"]
    for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts), p)):
        if path.name != "__init__.py" and (sentence := first_paragraph(path)):
            rows.append(f"| `{path.relative_to(package)}` | {sentence} |")
    return "\n".join(rows) + "\n"


def layers(package: Path) -> str:
    """A table: the sub-packages in the order of the import contract, those above first."""
    rows = ["| layer | what it is |", "| --- | --- |"]
    for name in layer_names(package.name):
        if (init := package / name / "__init__.py").is_file():
            rows.append(f"| `{name}/` | {first_paragraph(init)} |")
    return "\n".join(rows) + "\n"


def layer_names(package: str) -> list[str]:
    """Of the contract in pyproject.toml that has this package as its container, top to bottom."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (lines,) = (contract["layers"] for contract in contracts if contract.get("containers") == [package])
    return [name.strip("() ") for line in lines for name in line.split("|")]


def first_paragraph(path: Path) -> str:
    """The first paragraph of a module's docstring on one line; empty without one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def render(text: str) -> str:
    """`text` with the lists between their markers brought up to date."""
    for name, package in PACKAGES.items():
        text = _replace(text, f"{name} layers", layers(package))
        text = _replace(text, name, modules(package))
    return text


def _replace(text: str, name: str, table: str) -> str:
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert pattern.search(text), f"there is no place marked {name}"
    return pattern.sub(lambda found: found[1] + table + found[2], text)


if __name__ == "__main__":
    page = ROOT / "docs/structure.md"
    page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
