"""Writes the module lists of docs/structure.md from the modules' own first sentences.

python docs/make_structure.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"eagle_run": ROOT / "runtime/eagle_run", "eagle_export": ROOT / "eagle_export"}


def listing(package: Path) -> str:
    """A table: each module under `package` and the first paragraph of its docstring."""
    rows = ["| module | what it is |", "| --- | --- |"]
    for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts), p)):
        if sentence := first_paragraph(path):
            rows.append(f"| `{path.relative_to(package)}` | {sentence} |")
    return "\n".join(rows) + "\n"


def first_paragraph(path: Path) -> str:
    """The first paragraph of a module's docstring on one line; empty without one, and for `__init__.py`."""
    if path.name == "__init__.py":
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def render(text: str) -> str:
    """`text` with each package's list between its markers brought up to date."""
    for name, package in PACKAGES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        table = listing(package)
        text = pattern.sub(lambda found, table=table: found[1] + table + found[2], text)
    return text


if __name__ == "__main__":
    page = ROOT / "docs/structure.md"
    page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
