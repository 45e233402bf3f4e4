"""The documents that are made from the code say what the code says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_structure_lists_every_module() -> None:
    spec = importlib.util.spec_from_file_location("make_structure", ROOT / "docs/make_structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    assert page == module.render(page), "run: python docs/make_structure.py"


def test_readme_has_the_measured_figures() -> None:
    check = [sys.executable, "-m", "benchmarks.readme_tables", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
