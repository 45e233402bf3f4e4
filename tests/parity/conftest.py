"""Targets and exported graphs that several files of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.targetmaker import ROWS, make_model

from eagle_export.graphs.target import export_target
from eagle_export.models.target import TargetModule
from eagle_run.bundle.tensors import GraphSpec

torch.set_num_threads(1)


@dataclass(frozen=True)
class Target:
    """A tiny target: Transformers' model, our module around it, and the exported graph."""

    model: Any
    module: TargetModule
    path: Path
    spec: GraphSpec


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """kind, or kind-fp16 for half precision -> target, each exported once."""
    made: dict[str, Target] = {}

    def get(kind: str) -> Target:
        if kind not in made:
            model = make_model(kind.removesuffix("-fp16"))
            model = model.half() if kind.endswith("-fp16") else model
            module = TargetModule(model, (0, 1, 3)).eval()
            path = tmp_path_factory.mktemp(kind) / "target.onnx"
            made[kind] = Target(model, module, path, export_target(module, path, cache_rows=ROWS))
        return made[kind]

    return get
