"""Checkpoints in the shapes of big Llamas that take almost no disk: sparse files whose weights are zeros.

    python -m benchmarks.sparse_checkpoint 70b FOLDER     # writes FOLDER/target and FOLDER/head: 4 MB on disk

A file has its header and its true length, and holes where the weights would be; only the norms, which are
ones, and a head's vocabulary maps are written. To read and to hash it costs what a full file costs, without
the disk: what an export takes can be tried, not what the model says. Copying a hole's zeros fills real disk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import random_llama
from benchmarks.random_llama import Size, Weight

SHARD_BYTES = 5_000_000_000  # as Transformers splits a checkpoint
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_VOCAB = {"vocab": 128256, "draft_vocab": 32000, "positions": 131072}


@dataclass(frozen=True)
class Shape:
    """A target and the EAGLE-3 head that is public for it. tied: no lm_head of its own. factor: of its RoPE.

    The head has the target's widths unless `head` gives its own; then it also has an embedding of its own.
    """

    target: Size
    factor: float
    tied: bool = False
    head: Size | None = None
    shard_bytes: int = field(default=SHARD_BYTES, kw_only=True)


SHAPES = {
    "tiny": Shape(
        Size(512, 256, layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=128, positions=16384),
        factor=8.0,
        head=Size(512, 256, layers=1, hidden=48, heads=3, kv_heads=1, head_dim=16, inner=96, positions=16384),
        shard_bytes=300_000,
    ),
    # Llama-3.2-1B, Llama-3.1-8B, Llama-3.3-70B; the head of yuhuili/EAGLE3-LLaMA3.3-Instruct-70B is narrower
    # than its target. (Taken from what is written about them: no hub was at hand.)
    "1b": Shape(
        Size(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192, **_VOCAB),
        factor=32.0,
        tied=True,
    ),
    "8b": Shape(
        Size(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, **_VOCAB), factor=8.0
    ),
    "70b": Shape(
        Size(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, inner=28672, **_VOCAB),
        factor=8.0,
        head=Size(layers=1, hidden=6144, heads=48, kv_heads=8, head_dim=128, inner=16384, **_VOCAB),
    ),
}


def write_target(folder: Path, shape: str) -> Path:
    """Writes a Hugging Face folder with tokenizer and bfloat16 weights in shards; returns it.

    shape: a key of SHAPES. Ids of the vocabulary beyond the small tokenizer's have no text.
    """
    sizes = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(sizes, sizes.target) | {"tie_word_embeddings": sizes.tied}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    random_llama.write_tokenizer(folder)
    tensors = random_llama.target_weights(sizes.target)
    if not sizes.tied:
        tensors["lm_head.weight"] = Weight((sizes.target.vocab, sizes.target.hidden), 0.0)
    shards = _shards(tensors, sizes.shard_bytes)
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            name = "model.safetensors"
        _write_sparse(folder / name, shard)
        places |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(_bytes(weight) for weight in tensors.values())
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places}
        )
    return folder


def write_head(folder: Path, shape: str) -> Path:
    """Writes the EAGLE-3 head of a shape, in SafeAILab's layout, with a random draft vocabulary."""
    sizes = SHAPES[shape]
    size = sizes.head or replace(sizes.target, layers=1)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(sizes, size) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": size.draft_vocab,
        "tie_word_embeddings": False,
    }
    tensors = random_llama.head_weights(size)
    if sizes.head is not None:
        config["target_hidden_size"] = sizes.target.hidden
        tensors["fc.weight"] = Weight((size.hidden, 3 * sizes.target.hidden), 0.0)
        tensors["embed_tokens.weight"] = Weight((size.vocab, size.hidden), 0.0)
    _write_json(folder / "config.json", config)
    _write_sparse(folder / "model.safetensors", tensors, random_llama.vocabulary(size, seed=0))
    return folder


def _config(shape: Shape, size: Size) -> dict[str, Any]:
    """A Llama-3 config of one of the shape's models."""
    rope = {**_LLAMA3, "factor": shape.factor, "original_max_position_embeddings": 8192}
    return random_llama.config_of(size) | {
        "dtype": "bfloat16",
        "rope_theta": 500000.0,
        "rope_scaling": rope,
    }


def _shards(tensors: Mapping[str, Weight], limit: int) -> list[dict[str, Weight]]:
    """The tensors in order; a shard is full before it would exceed the limit."""
    shards: list[dict[str, Weight]] = [{}]
    filled = 0
    for name, weight in tensors.items():
        if shards[-1] and filled + _bytes(weight) > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = weight
        filled += _bytes(weight)
    return shards


def _write_sparse(
    path: Path, weights: Mapping[str, Weight], given: Mapping[str, Tensor] | None = None
) -> None:
    """A safetensors file: `given` tensors, then bfloat16 `weights`: norms are ones, the others holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    written: dict[int, Tensor] = {}  # by offset
    end = 0
    for name, tensor in (given or {}).items():  # eight-byte values first: offsets stay aligned
        kind = {torch.int64: "I64", torch.bool: "BOOL"}[tensor.dtype]
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        written[end] = tensor
        end += tensor.nbytes
    for name, weight in weights.items():
        if weight.spread is None:
            written[end] = torch.ones(weight.shape, dtype=torch.bfloat16)
        offsets = [end, end + _bytes(weight)]
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for offset, tensor in written.items():
            file.seek(start + offset)
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        file.truncate(start + end)


def _bytes(weight: Weight) -> int:
    return 2 * math.prod(weight.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@click.command(help=__doc__)
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("folder", type=click.Path(path_type=Path))
def main(shape: str, folder: Path) -> None:
    files = [
        path
        for place in (write_target(folder / "target", shape), write_head(folder / "head", shape))
        for path in place.iterdir()
    ]
    stats = [path.stat() for path in files]
    length, blocks = sum(stat.st_size for stat in stats), sum(stat.st_blocks for stat in stats)
    click.echo(json.dumps({"bytes": length, "bytes_on_disk": 512 * blocks}))


if __name__ == "__main__":
    main()
