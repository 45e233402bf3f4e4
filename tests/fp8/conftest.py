"""Tiny modules and their scales, calibrated once."""

from __future__ import annotations

from pathlib import Path

import pytest
from fp8ref import PROMPTS, TREE
from tiny import modules_of

from eagle_export.fp8 import Scales, calibrate
from eagle_export.reference import Modules


@pytest.fixture(scope="session")
def modules(tiny_target: Path, tiny_head: Path) -> Modules:
    """A tiny target and its EAGLE-3 head in float32. Do not change them."""
    return modules_of(tiny_target, tiny_head)


@pytest.fixture(scope="session")
def scales(modules: Modules) -> Scales:
    return calibrate(modules, PROMPTS, shape=TREE, tokens=8, target_sha256="a" * 64, head_sha256="b" * 64)
