"""A whole bundle made by hand in a fraction of a second: one attention layer over bytes, and a draft like it.

The logits of both graphs depend on the attended context (through the cache, the mask and the positions of the
rows), so a cache or mask that went wrong changes the text. The draft sees a noisy copy of the target, so that
some drafts are accepted and some are not. No exporter is involved: the graphs follow docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, DRAFT_VOCAB, WIDTH, ROWS = 257, 128, 8, 288
END = 256
MAX_SEQ_LEN = 192
_FLOAT, _INT, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def make_bundle(root: Path, *, head: bool = True, name: str = "tiny") -> Path:
    """Writes the bundle into the new folder `root`."""
    (root / "onnx").mkdir(parents=True)
    (root / "tokenizer").mkdir()
    rng = np.random.default_rng(3)
    weights = {
        "embed": rng.normal(size=(VOCAB, WIDTH)),
        "table": 2.0 * rng.normal(size=(VOCAB, VOCAB)),  # next token's logits by this token …
        "mix": 2.0 * rng.normal(size=(WIDTH, VOCAB)),  # … and by what attention gives
    }
    weights["table"][:, DRAFT_VOCAB:] -= 3  # the draft knows most of what is said
    weights["table"][:, END] -= 3  # answers should not end at once
    noisy = {key: value + 0.2 * rng.normal(size=value.shape) for key, value in weights.items()}
    draft = {key: value if key == "embed" else value[:, :DRAFT_VOCAB] for key, value in noisy.items()}
    graphs = {"target": _graph("target", weights, VOCAB)}
    if head:
        graphs["draft"] = _graph("draft", draft, DRAFT_VOCAB)
        save_file({"draft_to_target": torch.arange(DRAFT_VOCAB)}, root / "vocab_map.safetensors")
    for graph, model in graphs.items():
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, root / f"onnx/{graph}.onnx")
    _byte_tokenizer().save(str(root / "tokenizer/tokenizer.json"))
    (root / "tokenizer/chat_template.jinja").write_text(TEMPLATE)
    manifest = _manifest(root, graphs, head=head, name=name)
    (root / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return root


def _graph(name: str, weights: dict[str, np.ndarray], vocab: int) -> onnx.ModelProto:
    """input_ids → embedding → attention over the cache; logits = table[id] + attention · mix."""
    cache = ["B", 1, ROWS, WIDTH]
    inputs = [("input_ids", _INT, ["B", "T"])]
    if name == "draft":
        inputs.append(("hidden", _FLOAT, ["B", "T", WIDTH]))
    inputs += [
        ("position_ids", _INT, ["B", "T"]),
        ("tree_mask", _BOOL, ["B", 1, "T", "KV"]),
        ("write_index", _INT, ["B"]),
        ("logits_index", _INT, ["B", "R"]),
        ("past_key.0", _FLOAT, cache),
        ("past_value.0", _FLOAT, cache),
    ]
    rows = "hidden_out" if name == "draft" else "features"
    outputs = [("logits", _FLOAT, ["B", "R", vocab]), (rows, _FLOAT, ["B", "T", WIDTH])]
    outputs += [("present_key.0", _FLOAT, cache), ("present_value.0", _FLOAT, cache)]
    node = helper.make_node
    # Queries turn with the position, so that a wrong position shows.
    nodes = [
        node("Gather", ["embed", "input_ids"], ["x"]),
        node("Cast", ["position_ids"], ["position"], to=_FLOAT),
        node("Unsqueeze", ["position", "last"], ["position_"]),
        node("Sin", ["position_"], ["turn"]),
        node("Mul", ["x", "turn"], ["turned"]),
        node("Unsqueeze", ["turned", "one"], ["q"]),  # [B, 1, T, WIDTH]
        node("Unsqueeze", ["x", "one"], ["kv"]),
        node("TensorScatter", ["past_key.0", "kv", "write_index"], ["present_key.0"], axis=2),
        node("TensorScatter", ["past_value.0", "kv", "write_index"], ["present_value.0"], axis=2),
        node("Shape", ["tree_mask"], ["width"], start=3, end=4),
        node("Slice", ["present_key.0", "zero", "width", "two"], ["k"]),
        node("Slice", ["present_value.0", "zero", "width", "two"], ["v"]),
        node("Attention", ["q", "k", "v", "tree_mask"], ["seen_"]),
        node("Squeeze", ["seen_", "one"], ["seen"]),  # [B, T, WIDTH]
        *(
            [node("Add", ["seen", "hidden_"], [rows])]
            if name == "draft"
            else [node("Identity", ["seen"], [rows])]
        ),
        node("MatMul", [rows, "mix"], ["by_context"]),
        node("Gather", ["table", "input_ids"], ["by_token"]),
        node("Add", ["by_context", "by_token"], ["all"]),
        node("Unsqueeze", ["logits_index", "last"], ["index"]),
        node("GatherND", ["all", "index"], ["logits"], batch_dims=1),
    ]
    if name == "draft":
        nodes.insert(0, node("Mul", ["hidden", "little"], ["hidden_"]))
    constants = {key: value.astype(np.float32) for key, value in weights.items()}
    constants |= {
        key: np.array([at], np.int64) for key, at in (("zero", 0), ("one", 1), ("two", 2), ("last", -1))
    }
    if name == "draft":
        constants["little"] = np.array([0.1], np.float32)
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*spec) for spec in inputs],
        [helper.make_tensor_value_info(*spec) for spec in outputs],
        [numpy_helper.from_array(value, key) for key, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def _byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def _entry(root: Path, relative: str) -> dict[str, Any]:
    data = (root / relative).read_bytes()
    return {"path": relative, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _tensors(values: Any) -> list[dict[str, Any]]:
    names = {_FLOAT: "float32", _INT: "int64", _BOOL: "bool"}
    return [
        {
            "name": value.name,
            "dtype": names[value.type.tensor_type.elem_type],
            "shape": [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        }
        for value in values
    ]


def _manifest(root: Path, graphs: dict[str, onnx.ModelProto], *, head: bool, name: str) -> dict[str, Any]:
    sizes = {"layers": 1, "hidden_size": WIDTH, "heads": 1, "kv_heads": 1, "head_dim": WIDTH}
    draft = {
        "algorithm": "eagle1",
        "dialect": "safeai",
        "source": "by hand",
        "sha256": "b" * 64,
        "target_sha256": "a" * 64,
        "draft_vocab_size": DRAFT_VOCAB,
        "feature_layers": [1],
        "vocab_map": _entry(root, "vocab_map.safetensors") if head else None,
        **sizes,
    }
    return {
        "schema_version": 3,
        "name": name,
        "created": "2026-01-01T00:00:00+00:00",
        "tool_version": "0.1.0",
        "target": {
            "name": "tiny",
            "family": "bytes",
            "source": "by hand",
            "sha256": "a" * 64,
            "vocab_size": VOCAB,
            **sizes,
        },
        "head": draft if head else None,
        "limits": {
            "max_seq_len": MAX_SEQ_LEN,
            "max_batch": 4,
            "prefill_chunk": 16,
            "max_tree_nodes": 64,
            "cache_rows": ROWS,
            "draft_cache_rows": ROWS if head else 0,
        },
        "tree": {"kind": "dynamic", "depth": 3, "top_k": 3, "nodes": 8, "parents": None} if head else None,
        "stop_token_ids": [END],
        "tokenizer": [
            _entry(root, f"tokenizer/{file}") for file in ("tokenizer.json", "chat_template.jinja")
        ],
        "artifacts": [
            {
                "graph": graph,
                "backend": "onnx",
                "precision": "fp32",
                "file": f"onnx/{graph}.onnx",
                "files": [_entry(root, f"onnx/{graph}.onnx")],
                "opset": 24,
                "library_version": onnx.__version__,
                "compute_capabilities": [],
                "inputs": _tensors(model.graph.input),
                "outputs": _tensors(model.graph.output),
            }
            for graph, model in graphs.items()
        ],
        "build": {"seconds": 0.1, "peak_memory_bytes": 1, "versions": {}},
    }
