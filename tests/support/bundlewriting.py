"""Writes small bundles through the writer, the way a build does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle_export.pipeline.writer import BundleWriter
from eagle_run.bundle.manifest import GraphName, graph_tensor_names
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from support.bundlemaker import DRAFT_VOCAB, LAYERS, fields

LAYERS_OF: dict[GraphName, int] = {"target": LAYERS, "fuse": 0, "draft": 1}


def spec(graph: GraphName, dtype: str = "float32") -> GraphSpec:
    inputs, outputs = graph_tensor_names(graph, LAYERS_OF[graph])

    def tensors(names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, dtype, ("B", "T")) for name in names)

    return GraphSpec(graph, tensors(inputs), tensors(outputs))


def fill(writer: BundleWriter, mark: str = "") -> dict[str, Any]:
    """Writes graphs and vocabulary map; returns what `finish` needs."""
    for graph in LAYERS_OF:
        writer.file(f"onnx/{graph}.onnx").write_text(f"{graph}{mark}")
        writer.file(f"onnx/{graph}.onnx.data").write_bytes(bytes(1000))
        writer.add_artifact(
            graph,
            "onnx",
            "fp32",
            f"onnx/{graph}.onnx",
            spec(graph),
            extra_files={f"onnx/{graph}.onnx.data": None},
            opset=24,
            library_version="onnx 1.23.2",
        )
    entry = writer.write_vocab_map(torch.arange(DRAFT_VOCAB) * 3)
    data = fields(writer.folder)
    data["head"]["vocab_map"] = entry
    data["head"]["feature_layers"] = (0, 1, 2)
    data["stop_token_ids"] = (2, 63)
    own = {"schema_version", "name", "created", "tool_version"}
    return {key: value for key, value in data.items() if key not in own}


def write(path: Path, mark: str = "", **options: Any) -> None:
    with BundleWriter(path, **options) as writer:
        writer.finish(**fill(writer, mark))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "cache")
