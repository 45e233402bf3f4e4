"""Makes small bundles by hand, without the writer, so that reader and writer are tested apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle_run.bundle.manifest import graph_tensor_names

LAYERS, VOCAB, DRAFT_VOCAB = 2, 64, 16
Edit = Callable[[dict[str, Any]], None]


def byte_tokenizer() -> Tokenizer:
    """Byte-level: one token per byte, no merges, and one special token, <end>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def entry(root: Path, relative: str) -> dict[str, Any]:
    data = (root / relative).read_bytes()
    return {"path": relative, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def tensors(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": "float32", "shape": ["B", 2, 96, 8] if "past" in name else ["B", "T"]}
        for name in names
    ]


def write_bundle(root: Path, edit: Edit | None = None) -> Path:
    """A whole bundle with fake graphs; `edit` changes the manifest before it is written."""
    (root / "onnx").mkdir(parents=True)
    (root / "tokenizer").mkdir()
    byte_tokenizer().save(str(root / "tokenizer/tokenizer.json"))
    table = torch.arange(DRAFT_VOCAB, dtype=torch.int64) * 3
    save_file({"draft_to_target": table}, root / "vocab_map.safetensors")
    artifacts = []
    for graph, layers in (("target", LAYERS), ("fuse", 0), ("draft", 1)):
        (root / f"onnx/{graph}.onnx").write_bytes(b"graph of " + graph.encode())
        (root / f"onnx/{graph}.onnx.data").write_bytes(bytes(range(64)))
        inputs, outputs = graph_tensor_names(graph, layers)  # type: ignore[arg-type]
        artifacts.append(
            {
                "graph": graph,
                "backend": "onnx",
                "precision": "fp32",
                "file": f"onnx/{graph}.onnx",
                "files": [entry(root, f"onnx/{graph}.onnx"), entry(root, f"onnx/{graph}.onnx.data")],
                "opset": 24,
                "library_version": "onnx 1.23.2",
                "compute_capabilities": [],
                "engine": None,
                "inputs": tensors(inputs),
                "outputs": tensors(outputs),
            }
        )
    data = fields(root) | {"artifacts": artifacts, "tokenizer": [entry(root, "tokenizer/tokenizer.json")]}
    if edit:
        edit(data)
    (root / "manifest.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
    return root


def add_engines(data: dict[str, Any], root: Path, *groups: tuple[str, ...], **changes: Any) -> None:
    """An edit: an engine of the target for each group of GPUs, beside the graphs that are there."""
    (root / "engines").mkdir()
    for group in groups:
        arch = "-".join(f"sm{capability.replace('.', '')}" for capability in group)
        file = f"engines/target.tensorrt-{arch}.engine"
        (root / file).write_bytes(f"engine for {arch}".encode())
        data["artifacts"].append(
            {
                **data["artifacts"][0],
                "backend": "tensorrt",
                "precision": "fp8",
                "file": file,
                "files": [entry(root, file)],
                "opset": None,
                "library_version": "tensorrt 11.4.0",
                "compute_capabilities": list(group),
                "engine": engine(),
                **changes,
            }
        )


def engine() -> dict[str, Any]:
    """An EngineInfo of two profiles: one whose layers are known, one whose are not."""
    rows = {"min": 1, "opt": 16, "max": 64}
    layers = {
        "kernels": 402,
        "attention": {"_gemm_mha_v2": 2},
        "gemms": {"fp8": 8, "fp16": 1},
        "scratch_bytes": 10_400_000,
    }
    batch = {"min": 1, "opt": 1, "max": 2}
    return {
        "profiles": [
            {"name": "verify", "axes": {"B": batch, "T": rows}, "layers": layers},
            {"name": "plain", "axes": {"B": batch, "T": {"min": 1, "opt": 1, "max": 1}}, "layers": None},
        ],
        "hardware_compatibility": "none",
        "version_compatible": False,
        "attention_layers": 2,
        "cache_updates": 4,
        "seconds": 12.3,
        "peak_memory_bytes": 1_400_000_000,
    }


ACCURACY = {
    "backend": "onnxruntime",
    "prompts": 24,
    "tokens": 1200,
    "top1_agreement": 0.9225,
    "kl": 0.0371,
    "perplexity": 4.25,
    "reference_perplexity": 4.125,
    "tokens_per_round": 1.68,
    "reference_tokens_per_round": 1.74,
}
QUANTIZATION = {"source": "calibrated", "base": "fp16", "tokens": 900, "linears": 210, "kept": ["lm_head"]}


def fields(root: Path) -> dict[str, Any]:
    """A manifest without artifacts and tokenizer."""
    sizes = {"hidden_size": 16, "heads": 2, "kv_heads": 2, "head_dim": 8}
    return {
        "schema_version": 3,
        "name": "tiny",
        "created": "2026-01-01T00:00:00+00:00",
        "tool_version": "0.1.0",
        "target": {
            "name": "tiny-target",
            "family": "llama",
            "source": "org/tiny",
            "sha256": "a" * 64,
            "layers": LAYERS,
            "vocab_size": VOCAB,
            **sizes,
        },
        "head": {
            "algorithm": "eagle3",
            "dialect": "safeai",
            "source": "org/tiny-head",
            "sha256": "b" * 64,
            "target_sha256": "a" * 64,
            "layers": 1,
            "draft_vocab_size": DRAFT_VOCAB,
            "feature_layers": [0, 1, 2],
            "vocab_map": entry(root, "vocab_map.safetensors"),
            **sizes,
        },
        "limits": {
            "max_seq_len": 64,
            "max_batch": 2,
            "prefill_chunk": 16,
            "max_tree_nodes": 32,
            "cache_rows": 96,
            "draft_cache_rows": 96,
        },
        "tree": {"kind": "dynamic", "depth": 2, "top_k": 2, "nodes": 4, "parents": None},
        "stop_token_ids": [2, 63],
        "quantization": None,
        "accuracy": None,
        "build": {"seconds": 1.5, "peak_memory_bytes": 10**6, "versions": {"torch": "2.13.0"}},
    }
