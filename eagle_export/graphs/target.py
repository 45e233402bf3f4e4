"""target.onnx: the whole target model as one graph for prefill, plain decoding and tree verification."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from eagle_export.graphs.export import Options, export_as
from eagle_export.graphs.specs import target_spec
from eagle_export.models.target import TargetModule
from eagle_run.bundle.tensors import GraphSpec


def export_target(
    module: TargetModule, path: Path, *, cache_rows: int, **options: Unpack[Options]
) -> GraphSpec:
    """Trace `module` and write target.onnx at `path`, its weights in target.onnx.data beside it.

    cache_rows: S, the fixed number of rows of each cache tensor; it must leave room for the longest sequence
    and one padded tree. B, T, R and KV stay dynamic. Caches and features have the dtype of the module's
    weights. Raises EagleError when the model cannot be traced.
    """
    return export_as(target_spec(module, cache_rows), module, path, prefix="model.", **options)
