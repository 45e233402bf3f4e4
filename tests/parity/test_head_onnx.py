"""fuse.onnx and draft.onnx in ONNX Runtime against the torch head they were traced from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.headmaker import RECIPES, make_head
from torch import Tensor

from eagle_export.graphs.draft import export_draft
from eagle_export.graphs.fuse import export_fuse
from eagle_export.heads.load import load_head
from eagle_export.models.head import Draft, Fuse, build_head

torch.set_num_threads(1)
ROWS = 24  # S
# The other EAGLE-3 kinds have the same fuse as the first of these.
FUSED = ("eagle3-own-embedding", "eagle3-specforge", "eagle3-specforge-norms")


def build(kind: str, folder: Path) -> tuple[Fuse | None, Draft]:
    head = make_head(RECIPES[kind])
    return build_head(load_head(head.write(folder / "head"), head.target), head.embedding, head.lm_head)


def run(path: Path, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = session.run(names, {key: np.ascontiguousarray(value.numpy()) for key, value in feeds.items()})
    return dict(zip(names, map(torch.from_numpy, results), strict=True))


def check_standard(path: Path) -> None:
    model = onnx.load(path)
    onnx.checker.check_model(str(path), full_check=True)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not model.functions
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]


@pytest.mark.parametrize("kind", FUSED)
def test_fuse_graph_equals_module(kind: str, tmp_path: Path) -> None:
    fuse, _ = build(kind, tmp_path)
    assert fuse is not None
    spec = export_fuse(fuse, tmp_path / "fuse.onnx")
    assert [(t.name, t.dtype, t.shape) for t in (*spec.inputs, *spec.outputs)] == [
        ("features", "float32", ("B", "T", fuse.spec.feature_width)),
        ("hidden", "float32", ("B", "T", fuse.spec.hidden_size)),
    ]
    check_standard(tmp_path / "fuse.onnx")
    for shape in ((1, 1), (2, 7)):
        features = torch.randn(*shape, fuse.spec.feature_width, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            want = fuse(features)
        got = run(tmp_path / "fuse.onnx", {"features": features})["hidden"]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_draft_graph_equals_module(kind: str, tmp_path: Path) -> None:
    _, draft = build(kind, tmp_path)
    path = tmp_path / "draft.onnx"
    spec = export_draft(draft, path, cache_rows=ROWS)
    sizes = draft.spec
    cache = ("B", sizes.kv_heads, ROWS, sizes.head_dim)
    layers = [(part, i) for i in range(sizes.layers) for part in ("key", "value")]
    assert [(t.name, t.dtype, t.shape) for t in spec.inputs] == [
        ("input_ids", "int64", ("B", "T")),
        ("hidden", "float32", ("B", "T", sizes.hidden_size)),
        ("position_ids", "int64", ("B", "T")),
        ("tree_mask", "bool", ("B", 1, "T", "KV")),
        ("write_index", "int64", ("B",)),
        ("logits_index", "int64", ("B", "R")),
        *((f"past_{part}.{i}", "float32", cache) for part, i in layers),
    ]
    assert [(t.name, t.dtype, t.shape) for t in spec.outputs] == [
        ("logits", "float32", ("B", "R", sizes.draft_vocab_size)),
        ("hidden_out", "float32", ("B", "T", sizes.hidden_size)),
        *((f"present_{part}.{i}", "float32", cache) for part, i in layers),
    ]
    check_standard(path)
    for seed, (batch, rows, kv) in enumerate(((1, 1, 1), (2, 4, 9))):
        feeds = draft_inputs(draft, batch, rows, kv, seed)
        got = run(path, feeds)
        with torch.no_grad():
            want = draft(*(tensor.clone() for tensor in feeds.values()))
        for tensor, value in zip(spec.outputs, want, strict=True):
            torch.testing.assert_close(got[tensor.name], value, atol=1e-3, rtol=1e-4)


def draft_inputs(draft: Draft, batch: int, rows: int, kv: int, seed: int) -> dict[str, Tensor]:
    """Random inputs; every sequence writes to other rows, and each row sees what is before it."""
    sizes, generator = draft.spec, torch.Generator().manual_seed(seed)
    start = torch.arange(batch) + (kv - rows - batch + 1)  # [B]
    at = start[:, None] + torch.arange(rows)  # [B, T]
    feeds = {
        "input_ids": torch.randint(sizes.vocab_size, (batch, rows), generator=generator),
        "hidden": torch.randn(batch, rows, sizes.hidden_size, generator=generator),
        "position_ids": at,
        "tree_mask": torch.arange(kv) <= at[:, None, :, None],  # [B, 1, T, KV]
        "write_index": start,
        "logits_index": torch.full((batch, 1), rows - 1),
    }
    shape = (batch, sizes.kv_heads, ROWS, sizes.head_dim)
    for i in range(sizes.layers):
        for part in ("key", "value"):
            feeds[f"past_{part}.{i}"] = torch.randn(shape, generator=generator)
    return feeds
