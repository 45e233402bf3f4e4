"""The signatures of the three graphs, for the exporter and for the eager reference, which needs no ONNX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.dtypes import dtype_of

if TYPE_CHECKING:
    from eagle_export.models.head import Draft, Fuse
    from eagle_export.models.target import TargetModule

Shape = tuple[int | str, ...]


def target_spec(module: TargetModule, cache_rows: int) -> GraphSpec:
    """The signature of the target graph with caches of `cache_rows` rows."""
    dims = module.dims
    dtype = dtype_of(next(module.parameters()).dtype).name
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


def fuse_spec(fuse: Fuse) -> GraphSpec:
    """The signature of the fuse graph."""
    dtype = dtype_of(fuse.fc.weight.dtype).name
    features = TensorSpec("features", dtype, ("B", "T", fuse.spec.feature_width))
    hidden = TensorSpec("hidden", dtype, ("B", "T", fuse.spec.hidden_size))
    return GraphSpec("fuse", (features,), (hidden,))


def draft_spec(draft: Draft, cache_rows: int) -> GraphSpec:
    """The signature of the draft graph with caches of `cache_rows` rows."""
    sizes = draft.spec
    dtype = dtype_of(draft.lm_head.weight.dtype).name
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


def cache_specs(prefix: str, layers: int, shape: Shape, dtype: str) -> tuple[TensorSpec, ...]:
    """Key and value of each layer in turn: past_key.0, past_value.0, past_key.1, ..."""
    return tuple(
        TensorSpec(f"{prefix}_{part}.{i}", dtype, shape) for i in range(layers) for part in ("key", "value")
    )
