"""Writes tiny Llama models as GGUF files, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS = 64, 128, 4, 2
# "\n\n" is one token of this vocabulary; digits first means that it stays one before a digit.
BLANKS_BEFORE_DIGITS = ["a", "ĊĊ", "1", "2"]


def write_gguf(
    path: Path, *, pre_tokenizer: str = "smollm", poison: bool = False, rope_dimensions: int = 16
) -> Path:
    """Two layers with grouped heads, matrices in Q4_1, a tied embedding in Q8_0."""
    rng = np.random.default_rng(0)

    specials = ["<unk>", "<start>", "<end>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(rope_dimensions)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    kinds = gguf.GGMLQuantizationType

    def add(name: str, kind: Any, *shape: int) -> None:
        data = rng.standard_normal(shape).astype(np.float32)
        if poison and kind is kinds.F32:
            data[(0,) * len(shape)] = np.nan
        writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)

    kv_size = HIDDEN // HEADS * KV_HEADS
    add("token_embd", kinds.Q8_0, len(tokens), HIDDEN)
    for layer in range(2):
        add(f"blk.{layer}.attn_q", kinds.Q4_1, HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k", kinds.Q4_1, kv_size, HIDDEN)
        add(f"blk.{layer}.attn_v", kinds.Q4_1, kv_size, HIDDEN)
        add(f"blk.{layer}.attn_output", kinds.Q4_1, HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate", kinds.Q4_1, INNER, HIDDEN)
        add(f"blk.{layer}.ffn_up", kinds.Q4_1, INNER, HIDDEN)
        add(f"blk.{layer}.ffn_down", kinds.Q4_1, HIDDEN, INNER)
        add(f"blk.{layer}.attn_norm", kinds.F32, HIDDEN)
        add(f"blk.{layer}.ffn_norm", kinds.F32, HIDDEN)
    add("output_norm", kinds.F32, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
