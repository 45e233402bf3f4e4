"""draft.onnx: a head's layers over their own KV cache, for priming and for every level of the tree."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from eagle_export.graphs.export import Options, export_as
from eagle_export.graphs.specs import draft_spec
from eagle_export.models.head import Draft
from eagle_run.bundle.tensors import GraphSpec


def export_draft(draft: Draft, path: Path, *, cache_rows: int, **options: Unpack[Options]) -> GraphSpec:
    """Trace `draft` and write draft.onnx at `path`, its weights in draft.onnx.data beside it.

    cache_rows: S, the fixed number of rows of each cache tensor; it must leave room for the longest sequence
    and the tree's rows. B, T, R and KV stay dynamic. Caches and hidden have the dtype of the weights. Raises
    EagleError when the draft cannot be traced.
    """
    return export_as(draft_spec(draft, cache_rows), draft, path, **options)
