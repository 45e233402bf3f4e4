"""target.onnx: the whole target model as one graph for prefill, plain decoding and tree verification."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eagle_export.graphs.export import export_graph
from eagle_export.models.target import TargetModule
from eagle_run.backends.base import GraphSpec


def export_target(module: TargetModule, path: Path, *, cache_rows: int) -> GraphSpec:
    """Trace `module` and write target.onnx at `path`, its weights in target.onnx.data beside it.

    cache_rows: S, the fixed number of rows of each cache tensor; it must leave room for the longest sequence
    and one padded tree. B, T, R and KV stay dynamic. Caches and features have the dtype of the module's weights.
    Raises EagleError when the model cannot be traced.
    """
    inputs = example_inputs(module, cache_rows)
    layers = range(module.dims.layers)
    past = [key for key in inputs if key.startswith("past_")]
    outputs = ["logits", "features"]
    outputs += [name for i in layers for name in (f"present_key.{i}", f"present_value.{i}")]
    dynamic = {
        "input_ids": {0: "B", 1: "T"},
        "position_ids": {0: "B", 1: "T"},
        "tree_mask": {0: "B", 2: "T", 3: "KV"},
        "write_index": {0: "B"},
        "logits_index": {0: "B", 1: "R"},
        **{key: {0: "B"} for key in past},
    }
    return export_graph(module, inputs, outputs, dynamic, path, name="target")


def example_inputs(module: TargetModule, cache_rows: int) -> dict[str, Tensor]:
    """Inputs of the target graph in order: B=2, T=3, R=2 and KV=5, so that no two dynamic sizes look alike."""
    dims = module.dims
    weight = next(module.parameters())
    batch, rows, kv = 2, 3, 5
    cache = (batch, dims.kv_heads, cache_rows, dims.head_dim)
    ids = torch.arange(batch * rows, device=weight.device).view(batch, rows) % dims.vocab_size  # [B, T]
    inputs = {
        "input_ids": ids,
        "position_ids": ids.clone(),
        "tree_mask": torch.ones(batch, 1, rows, kv, dtype=torch.bool, device=weight.device),
        "write_index": torch.arange(batch, device=weight.device),
        "logits_index": ids[:, :2] % rows,  # [B, R]
    }
    for i in range(dims.layers):
        for part in ("key", "value"):
            inputs[f"past_{part}.{i}"] = torch.zeros(cache, dtype=weight.dtype, device=weight.device)
    return inputs
