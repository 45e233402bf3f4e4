"""fuse.onnx: from the target's features to the hidden that the draft starts from (EAGLE-3 only)."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_export.graphs.export import export_graph
from eagle_export.models.head import Fuse
from eagle_run.backends.base import GraphSpec


def export_fuse(fuse: Fuse, path: Path) -> GraphSpec:
    """Trace `fuse` and write fuse.onnx at `path`, its weights in fuse.onnx.data beside it.

    features [B, T, n*H] -> hidden [B, T, Hd], both in the dtype of the weights; B and T stay dynamic.
    """
    weight = fuse.fc.weight
    features = torch.zeros(2, 3, fuse.spec.feature_width, dtype=weight.dtype, device=weight.device)
    dynamic = {"features": {0: "B", 1: "T"}}
    return export_graph(fuse, {"features": features}, ["hidden"], dynamic, path, name="fuse")
