"""Tiny modules and their scales, calibrated once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import modules_of

from eagle_export.fp8 import Scales, calibrate
from eagle_export.reference import Modules
from eagle_run.tree import TreeShape

PROMPTS = ((2, 17, 9, 40, 33, 3), (2, 8, 61, 3), (2, 70, 71, 5, 6, 22, 41, 13, 3))
TREE = TreeShape.dynamic(3, 2, 6)


@pytest.fixture(scope="session")
def modules(tiny_target: Path, tiny_head: Path) -> Modules:
    """A tiny target and its EAGLE-3 head in float32. Do not change them."""
    return modules_of(tiny_target, tiny_head)


@pytest.fixture(scope="session")
def scales(modules: Modules) -> Scales:
    return calibrate(modules, PROMPTS, shape=TREE, tokens=8, target_sha256="a" * 64, head_sha256="b" * 64)
