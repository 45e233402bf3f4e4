"""draft.onnx: a head's layers over their own KV cache, for priming and for every level of the tree."""

from __future__ import annotations

from pathlib import Path

from eagle_export.graphs.export import Rewrite, export_as
from eagle_export.graphs.target import cache_specs
from eagle_export.models.head import Draft
from eagle_run.backends.base import GraphSpec, TensorSpec


def export_draft(draft: Draft, path: Path, *, cache_rows: int, rewrite: Rewrite | None = None) -> GraphSpec:
    """Trace `draft` and write draft.onnx at `path`, its weights in draft.onnx.data beside it.

    cache_rows: S, the fixed number of rows of each cache tensor; it must leave room for the longest sequence
    and the tree's rows. B, T, R and KV stay dynamic. Caches and hidden have the dtype of the weights. Raises
    EagleError when the draft cannot be traced.
    """
    return export_as(draft_spec(draft, cache_rows), draft, path, rewrite=rewrite)


def draft_spec(draft: Draft, cache_rows: int) -> GraphSpec:
    """The signature of the draft graph with caches of `cache_rows` rows."""
    sizes = draft.spec
    dtype = str(draft.lm_head.weight.dtype).removeprefix("torch.")
    inputs = (
        TensorSpec("input_ids", "int64", ("B", "T")),
        TensorSpec("hidden", dtype, ("B", "T", sizes.hidden_size)),
        TensorSpec("position_ids", "int64", ("B", "T")),
        TensorSpec("tree_mask", "bool", ("B", 1, "T", "KV")),
        TensorSpec("write_index", "int64", ("B",)),
        TensorSpec("logits_index", "int64", ("B", "R")),
    )
    outputs = (
        TensorSpec("logits", "float32", ("B", "R", sizes.draft_vocab_size)),
        TensorSpec("hidden_out", dtype, ("B", "T", sizes.hidden_size)),
    )
    cache = (sizes.layers, ("B", sizes.kv_heads, cache_rows, sizes.head_dim), dtype)
    return GraphSpec("draft", inputs + cache_specs("past", *cache), outputs + cache_specs("present", *cache))
