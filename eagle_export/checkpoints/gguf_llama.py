"""A Llama model in a GGUF file, dequantised into a Hugging Face folder.

Transformers can read GGUF files too, and a test compares the two on a small model. It takes four times as
long, because it parses the file again and again, and it leaves out how text is split before the vocabulary is
applied, which for SmolLM2 changes the tokens of every number after a line break or several blanks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_run.errors import EagleError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from tokenizers import Tokenizer

Fields = dict[str, Any]

# llama.cpp's names of pre-tokenizers that are known here: whether each digit is a piece of its own before
# text is split the way GPT-2 does. ("\n\n1." is three tokens with it and four without: "\n" joins the digit.)
_DIGITS_FIRST = {"gpt-2": False, "smollm": True}
_CONTROL = 3  # llama.cpp's token type of special tokens
_AGAIN = "the file is damaged or incomplete; fetch it again"

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WANTED = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys of llama.* that say nothing new about the plain model built here. Any other one is an error.
_HARMLESS = {"llama.vocab_size", "llama.rope.dimension_count", "llama.rope.freq_base"}
_ROPE_SIZES = ("rope.dimension_count", "embedding_length", "attention.head_count")


def read(path: Path) -> GGUFReader:
    """The parsed file. Raises EagleError unless it is whole and of a kind that `write_folder` knows."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)  # reads every tensor's extent, so a truncated file fails here
        kinds = {key: _value(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre", "add_bos_token")}
        architecture = _value(reader, "general.architecture")
        rotated, width, heads = (_value(reader, f"llama.{key}") for key in _ROPE_SIZES)
        missing = [key for key in _WANTED if architecture == "llama" and key not in reader.fields]
    except Exception as error:  # the reader raises whatever numpy does
        raise EagleError(f"{path}: not a whole GGUF file: {error}", hint=_AGAIN) from None
    known = _WANTED.keys() | _HARMLESS
    unknown = sorted(key for key in reader.fields if key.startswith("llama.") and key not in known)
    faults = [
        (architecture != "llama", f"architecture {architecture!r}, expected 'llama'"),
        (bool(missing), f"keys {missing} are missing"),
        (not missing and rotated not in (None, width // heads), f"RoPE over {rotated} channels of a head"),
        (bool(unknown), f"keys {unknown} describe more than a plain Llama model"),
        (kinds["model"] != "gpt2", f"tokenizer {kinds['model']!r}, expected 'gpt2' (byte-level)"),
        (
            kinds["pre"] not in _DIGITS_FIRST,
            f"pre-tokenizer {kinds['pre']!r}, expected {list(_DIGITS_FIRST)}",
        ),
        (bool(kinds["add_bos_token"]), "a tokenizer that adds a start token, expected none"),
    ]
    if found := [message for wrong, message in faults if wrong]:
        raise EagleError(
            f"{path}: {'; '.join(found)}", hint="use the model's Hugging Face folder instead of its GGUF file"
        )
    return reader


def write_folder(path: Path, reader: GGUFReader, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer.

    Weights are float32: a dequantised value is scale * level + minimum with half-precision scale and minimum,
    whose sum needs more bits than a 16-bit type has (bf16 would round most of them). Tied weights are written
    once. Raises EagleError for tensors that are unknown or not finite.
    """
    from safetensors.torch import save_file

    config = _config(reader)
    save_file(_state(path, reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    ids: Fields = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(folder / "generation_config.json", {key: ids[key] for key in ids if key != "unk_token_id"})
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    tokens = _value(reader, "tokenizer.ggml.tokens")
    settings: Fields = {"tokenizer_class": "TokenizersBackend"}
    settings["model_max_length"] = config["max_position_embeddings"]
    settings |= {key.removesuffix("_id"): tokens[token] for key, token in ids.items()}
    _write_json(folder / "tokenizer_config.json", settings)
    if template := _value(reader, "tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _config(reader: GGUFReader) -> Fields:
    config: Fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    config |= {ours: _value(reader, theirs) for theirs, ours in _WANTED.items()}
    config["vocab_size"] = len(_value(reader, "tokenizer.ggml.tokens"))
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config["hidden_act"] = "silu"
    base = _value(reader, "llama.rope.freq_base") or 10000.0
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        token = _value(reader, f"tokenizer.ggml.{theirs}_token_id")
        if token is not None:
            config[f"{ours}_token_id"] = token
    return config


def _state(path: Path, reader: GGUFReader, config: Fields) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state = {}
    for stored in reader.tensors:
        name, kind = _name(path, stored.name)
        # GGUF lists dimensions innermost first.
        shape = [int(size) for size in reversed(stored.shape)]
        values = np.array(
            dequantize(stored.data, stored.tensor_type), dtype=np.float32
        )  # a copy, off the file
        tensor = torch.from_numpy(values).reshape(shape)
        if not torch.isfinite(tensor).all():
            raise EagleError(f"{path}: {stored.name} holds values that are not finite", hint=_AGAIN)
        state[name] = _halves(tensor, heads[kind]) if kind in heads else tensor
    return state


def _name(path: Path, stored: str) -> tuple[str, str]:
    """(Transformers' name, kind) of a tensor of the file, such as blk.3.attn_q.weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", stored)
    layer, kind = match.groups() if match else (None, "")
    known = _TENSORS if layer is None else _LAYER_TENSORS
    if kind not in known:
        raise EagleError(f"{path}: tensor {stored} is not part of a plain Llama model")
    return (f"model.layers.{layer}." if layer else "") + f"{known[kind]}.weight", kind


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp pairs neighbouring rows of a head for RoPE, Transformers row i with row i + Dh/2."""
    pairs = tensor.reshape(heads, -1, 2, tensor.shape[1])  # [heads, Dh/2, 2, H]
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if _DIGITS_FIRST[_value(reader, "tokenizer.ggml.pre")]:
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _write_json(path: Path, data: Fields) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
