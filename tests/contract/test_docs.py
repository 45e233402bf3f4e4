"""The documents that are made from the code say what the code says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import eagle_run

ROOT = Path(__file__).parents[2]


def generator(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_structure_lists_every_module() -> None:
    text = page("docs/structure.md")
    assert text == generator("make_structure").render(text), "run: python docs/make_structure.py"


@pytest.mark.parametrize("package", ["eagle_run", "eagle_export"])
def test_every_layer_has_a_sentence(package: str) -> None:
    structure = generator("make_structure")
    rows = structure.layers(structure.PACKAGES[package]).splitlines()[2:]
    inits = {path.parent.name for path in structure.PACKAGES[package].glob("*/__init__.py")}
    assert inits == set(re.findall(r"^\| `(\w+)/` \| .+ \|$", "\n".join(rows), re.MULTILINE))


def test_api_is_what_the_package_exports() -> None:
    text = page("docs/api.md")
    assert text == generator("make_api").render(), "run: python docs/make_api.py"
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(eagle_run.__all__)


def test_pages_have_the_measured_figures() -> None:
    check = [sys.executable, "-m", "benchmarks.readme_tables", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{path.name} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path.name} links to {link}"


def anchors(text: str) -> set[str]:
    """What a page's headings are called in links, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert len(page("README.md").splitlines()) <= 120
