"""What an export holds in memory does not grow with the number of layers."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN, INNER, VOCAB = 2048, 8192, 16000  # largest tensor in bf16: 67 MB; a layer: 134 MB
# The child prints its peak memory, in bytes, before it exports and after.
_CHILD = """
import sys
from pathlib import Path
import torch, onnx, onnxruntime, transformers
from transformers import LlamaForCausalLM
import torch.onnx._internal.exporter._core
from eagle_export.graphs.links import Links
from eagle_export.graphs.target import export_target
from eagle_export.models.skeleton import hollow, load_recorded
from eagle_export.models.target import TargetModule
from eagle_export.progress import peak_memory_bytes

folder, out, dtype, link = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
before = peak_memory_bytes()
model = load_recorded(folder, dtype)
weights = hollow(model)
links = Links({folder: "target-"}) if link == "link" else None
module = TargetModule(model, (1,)).eval()
export_target(module, out / "target.onnx", cache_rows=64, weights=weights, links=links)
print(before, peak_memory_bytes())
"""


def write_sparse(folder: Path, layers: int) -> int:
    """A Llama in bf16 whose weights are a hole in one file: it takes no disk. Returns its bytes."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, INNER)}
        shapes |= {f"{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a process does not know its peak memory there")
@pytest.mark.parametrize(("layers", "dtype", "link"), [(6, "float16", "copy"), (8, "bfloat16", "link")])
def test_peak_memory_is_that_of_the_largest_tensors(
    tmp_path: Path, layers: int, dtype: str, link: str
) -> None:
    total = write_sparse(tmp_path, layers)
    assert total > 800e6
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, tmp_path, tmp_path, dtype, link],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(int, done.stdout.split())
    data, written = tmp_path / "target.onnx.data", 0
    if data.exists():
        written = data.stat().st_size
        data.unlink()
    # Gate and up side by side are the largest weight, 67 MB; to trace and to write takes some more.
    assert after - before < 350e6, f"{(after - before) / 1e6:.0f} MB to export {total / 1e6:.0f} MB"
    assert (written < 1e6) if link == "link" else (written >= total)
