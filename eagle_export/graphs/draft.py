"""draft.onnx: a head's layers over their own KV cache, for priming and for every level of the tree."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eagle_export.graphs.export import export_graph
from eagle_export.models.head import Draft
from eagle_run.backends.base import GraphSpec


def export_draft(draft: Draft, path: Path, *, cache_rows: int) -> GraphSpec:
    """Trace `draft` and write draft.onnx at `path`, its weights in draft.onnx.data beside it.

    cache_rows: S, the fixed number of rows of each cache tensor; it must leave room for the longest sequence
    and the tree's rows. B, T, R and KV stay dynamic. Caches and hidden have the dtype of the weights.
    """
    inputs = example_inputs(draft, cache_rows)
    outputs = ["logits", "hidden_out"]
    for i in range(draft.spec.layers):
        outputs += [f"present_key.{i}", f"present_value.{i}"]
    dynamic = {
        "input_ids": {0: "B", 1: "T"},
        "hidden": {0: "B", 1: "T"},
        "position_ids": {0: "B", 1: "T"},
        "tree_mask": {0: "B", 2: "T", 3: "KV"},
        "write_index": {0: "B"},
        "logits_index": {0: "B", 1: "R"},
        **{key: {0: "B"} for key in inputs if key.startswith("past_")},
    }
    return export_graph(draft, inputs, outputs, dynamic, path, name="draft")


def example_inputs(draft: Draft, cache_rows: int) -> dict[str, Tensor]:
    """Inputs of the draft graph in order: B=2, T=3, R=2 and KV=5, so that no two dynamic sizes look alike."""
    spec, weight = draft.spec, draft.lm_head.weight
    batch, rows, kv = 2, 3, 5
    with torch.device(weight.device):
        ids = torch.zeros(batch, rows, dtype=torch.int64)
        inputs = {
            "input_ids": ids,
            "hidden": torch.zeros(batch, rows, spec.hidden_size, dtype=weight.dtype),
            "position_ids": ids.clone(),
            "tree_mask": torch.ones(batch, 1, rows, kv, dtype=torch.bool),
            "write_index": torch.zeros(batch, dtype=torch.int64),
            "logits_index": ids[:, :2].clone(),
        }
        for i in range(spec.layers):
            for part in ("key", "value"):
                shape = (batch, spec.kv_heads, cache_rows, spec.head_dim)
                inputs[f"past_{part}.{i}"] = torch.zeros(shape, dtype=weight.dtype)
    return inputs
