"""Tiny modules and their scales, calibrated once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fp8ref import PROMPTS, TREE
from support.tiny import modules_of

from eagle_export.checkpoints.fp8_scales import Scales
from eagle_export.quantize.fp8.calibrate import calibrate
from eagle_export.reference.modules import Modules


@pytest.fixture(scope="session")
def modules(tiny_target: Path, tiny_head: Path) -> Modules:
    """A tiny target and its EAGLE-3 head in float32. Do not change them."""
    return modules_of(tiny_target, tiny_head)


@pytest.fixture(scope="session")
def scales(modules: Modules) -> Scales:
    return calibrate(modules, PROMPTS, shape=TREE, tokens=8, target_sha256="a" * 64, head_sha256="b" * 64)
