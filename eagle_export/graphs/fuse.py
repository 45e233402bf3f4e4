"""fuse.onnx: from the target's features to the hidden that the draft starts from (EAGLE-3 only)."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from eagle_export.graphs.export import Options, export_as
from eagle_export.graphs.specs import fuse_spec
from eagle_export.models.head import Fuse
from eagle_run.bundle.tensors import GraphSpec


def export_fuse(fuse: Fuse, path: Path, **options: Unpack[Options]) -> GraphSpec:
    """Trace `fuse` and write fuse.onnx at `path`, its weights in fuse.onnx.data beside it.

    features [B, T, n*H] -> hidden [B, T, Hd], both in the dtype of the weights; B and T stay dynamic. Raises
    EagleError when it cannot be traced.
    """
    return export_as(fuse_spec(fuse), fuse, path, **options)
