"""Tiny graphs with heads that have a fused attention, and requests to compile them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle_export.engines.profiles import choose_profiles
from eagle_export.engines.request import EngineRequest, EngineSettings
from eagle_export.graphs.draft import export_draft
from eagle_export.graphs.export import Rewrite
from eagle_export.graphs.fuse import export_fuse
from eagle_export.graphs.target import export_target
from eagle_export.quantize.fp8.calibrate import named_graphs, named_linears
from eagle_export.quantize.fp8.rewrite import quantize
from eagle_export.reference import recipe as recipes
from eagle_export.reference.modules import Modules, load_config, load_fitting_head, load_modules
from eagle_run.bundle.manifest import Limits, TreeDefaults
from eagle_run.bundle.tensors import GraphSpec
from eagle_run.dtypes import BY_PRECISION
from support.tiny import Sizes, write_head, write_target

SIZES = Sizes(hidden=64, heads=4, kv_heads=2, inner=96, layers=2)  # heads of 16
LAYERS = SIZES.layers
ROWS = 192
LIMITS = Limits(
    max_seq_len=128, max_batch=4, prefill_chunk=32, max_tree_nodes=32, cache_rows=ROWS, draft_cache_rows=ROWS
)
TREE = TreeDefaults(kind="dynamic", depth=3, top_k=3, nodes=10)
ADA, BLACKWELL = "8.9", "12.0"
DTYPES = {name: dtype.torch for name, dtype in BY_PRECISION.items()} | {"fp8": torch.float16}  # its base


@dataclass(frozen=True)
class Graphs:
    """Exported graphs of one precision: <graph>.onnx in `folder`."""

    folder: Path
    specs: Mapping[str, GraphSpec]
    precision: str

    def request(self, graph: str, out: Path, **changes: Any) -> EngineRequest:
        """To compile one of them for two architectures; `changes` replace fields, `names` picks profiles."""
        names = changes.pop("names", ())
        fields: dict[str, Any] = {
            "backend": "tensorrt-rtx",
            "graph": graph,
            "onnx": self.folder / f"{graph}.onnx",
            "out": out,
            "spec": self.specs[graph],
            "precision": self.precision,
            "profiles": choose_profiles(graph, LIMITS, TREE, names),
            "settings": EngineSettings((ADA, BLACKWELL)),
        }
        return EngineRequest(**{**fields, **changes})


def load(folder: Path, dtype: torch.dtype, kind: str = "eagle3") -> Modules:
    """A tiny target and its head, made in `folder` the first time."""
    target, head = folder / "target", folder / kind
    if not target.exists():
        write_target(target, SIZES)
    if not head.exists():
        write_head(head, target, kind=kind, layer_ids=(0,))
    found = recipes.resolve_target(str(target))
    config = load_config(found, LIMITS.max_seq_len)
    return load_modules(found, load_fitting_head(recipes.resolve_head(str(head), found), config), dtype)


def export(modules: Modules, folder: Path, precision: str) -> Graphs:
    """Every graph of target and head, written to `folder`; for fp8 with made-up scales of all products."""
    assert modules.draft is not None
    rewrites: dict[str, Rewrite | None] = {name: None for name in named_graphs(modules)}
    if precision == "fp8":
        for name, module in named_graphs(modules).items():
            scales = dict.fromkeys(named_linears(module), 0.05)
            rewrites[name] = partial(_quantize, scales)
    places = {name: folder / f"{name}.onnx" for name in rewrites}
    specs = {
        "target": export_target(
            modules.target, places["target"], cache_rows=ROWS, rewrite=rewrites["target"]
        ),
        "draft": export_draft(modules.draft, places["draft"], cache_rows=ROWS, rewrite=rewrites["draft"]),
    }
    if modules.fuse is not None:
        specs["fuse"] = export_fuse(modules.fuse, places["fuse"], rewrite=rewrites["fuse"])
    return Graphs(folder, specs, precision)


def _quantize(scales: Mapping[str, float], model: Any) -> None:
    quantize(model, scales)
