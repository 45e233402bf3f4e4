"""target.onnx: the whole target model as one graph for prefill, plain decoding and tree verification."""

from __future__ import annotations

from pathlib import Path

from eagle_export.graphs.export import Rewrite, export_as
from eagle_export.models.target import TargetModule
from eagle_run.backends.base import GraphSpec, TensorSpec

Shape = tuple[int | str, ...]


def export_target(
    module: TargetModule, path: Path, *, cache_rows: int, rewrite: Rewrite | None = None
) -> GraphSpec:
    """Trace `module` and write target.onnx at `path`, its weights in target.onnx.data beside it.

    cache_rows: S, the fixed number of rows of each cache tensor; it must leave room for the longest sequence
    and one padded tree. B, T, R and KV stay dynamic. Caches and features have the dtype of the module's
    weights. Raises EagleError when the model cannot be traced.
    """
    return export_as(target_spec(module, cache_rows), module, path, prefix="model.", rewrite=rewrite)


def target_spec(module: TargetModule, cache_rows: int) -> GraphSpec:
    """The signature of the target graph with caches of `cache_rows` rows."""
    dims = module.dims
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    inputs = (
        TensorSpec("input_ids", "int64", ("B", "T")),
        TensorSpec("position_ids", "int64", ("B", "T")),
        TensorSpec("tree_mask", "bool", ("B", 1, "T", "KV")),
        TensorSpec("write_index", "int64", ("B",)),
        TensorSpec("logits_index", "int64", ("B", "R")),
    )
    outputs = (
        TensorSpec("logits", "float32", ("B", "R", dims.vocab_size)),
        TensorSpec("features", dtype, ("B", "T", len(module.feature_layers) * dims.hidden_size)),
    )
    cache = (dims.layers, ("B", dims.kv_heads, cache_rows, dims.head_dim), dtype)
    return GraphSpec("target", inputs + cache_specs("past", *cache), outputs + cache_specs("present", *cache))


def cache_specs(prefix: str, layers: int, shape: Shape, dtype: str) -> tuple[TensorSpec, ...]:
    """Key and value of each layer in turn: past_key.0, past_value.0, past_key.1, ..."""
    return tuple(
        TensorSpec(f"{prefix}_{part}.{i}", dtype, shape) for i in range(layers) for part in ("key", "value")
    )
