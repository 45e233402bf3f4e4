"""Writes tiny Llama models as GGUF files, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS = 32, 64, 4
# "\n\n" is one token of this vocabulary; digits first means that it stays one before a digit.
BLANKS_BEFORE_DIGITS = ["a", "ĊĊ", "1", "2"]


def write_gguf(
    path: Path, *, pre_tokenizer: str = "smollm", poison: bool = False
) -> tuple[Path, torch.Tensor]:
    """The file and its embedding [V, HIDDEN] (tied with the output)."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    specials = ["<unk>", "<start>", "<end>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
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
    embedding = values(len(tokens), HIDDEN)
    if poison:
        embedding[3, 4] = np.nan
    writer.add_tensor("token_embd.weight", embedding)
    for name, shape in (
        ("attn_q", (HIDDEN, HIDDEN)),
        ("attn_k", (HIDDEN, HIDDEN)),
        ("attn_v", (HIDDEN, HIDDEN)),
        ("attn_output", (HIDDEN, HIDDEN)),
        ("ffn_gate", (INNER, HIDDEN)),
        ("ffn_up", (INNER, HIDDEN)),
        ("ffn_down", (HIDDEN, INNER)),
        ("attn_norm", (HIDDEN,)),
        ("ffn_norm", (HIDDEN,)),
    ):
        writer.add_tensor(f"blk.0.{name}.weight", values(*shape))
    writer.add_tensor("output_norm.weight", values(HIDDEN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, torch.from_numpy(embedding)
