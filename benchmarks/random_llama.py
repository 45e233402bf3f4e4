"""Llamas and EAGLE-3 heads of random weights in the sizes of real ones: what the cost of a build is tried on.

    python -m benchmarks.random_llama 1b FOLDER     # writes FOLDER/target and FOLDER/head

The same name, type and seed give the same bytes. Weights are drawn and written piece by piece, so no size
needs more memory than a few hundred MB. The model answers nonsense, of finite numbers: activations keep the
spread that a trained model's have, so that 16 bit and FP8 can be calibrated and compiled as usual.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from eagle_run.dtypes import BY_PRECISION, dtype_of

_PRECISIONS = ("fp16", "bf16")
_PIECE = 1 << 22  # values that are drawn at a time
EOS = "</s>"
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Of a target; its head has one layer of the same widths. Embedding and lm_head are one matrix."""

    vocab: int
    draft_vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    positions: int = 4096


SIZES = {
    "tiny": Size(512, 256, layers=8, hidden=128, heads=4, kv_heads=2, head_dim=32, inner=256),
    "0.3b": Size(32000, 8192, layers=24, hidden=1024, heads=16, kv_heads=4, head_dim=64, inner=2816),
    # Llama-3.2-1B's shape
    "1b": Size(128256, 32000, layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192),
}


@dataclass(frozen=True)
class Weight:
    """A tensor to be drawn: normal with this spread, or of ones where the spread is None."""

    shape: tuple[int, ...]
    spread: float | None


def write(folder: Path, size: str, *, precision: str = "fp16", seed: int = 0) -> tuple[Path, Path]:
    """Writes FOLDER/target (a Hugging Face folder with a tokenizer) and FOLDER/head; returns both.

    size: a key of SIZES. precision: fp16 or bf16, of the stored weights. The head is in SafeAILab's layout,
    with a draft vocabulary and the usual layers' features.
    """
    sizes = SIZES[size]
    target, head = folder / "target", folder / "head"
    for place in (target, head):
        place.mkdir(parents=True, exist_ok=True)
    config = config_of(sizes)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": config["eos_token_id"], "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation) + "\n")
    write_tokenizer(target)
    _write_weights(target / "model.safetensors", target_weights(sizes), {}, precision, seed)
    draft = {**config, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    draft["draft_vocab_size"] = sizes.draft_vocab
    (head / "config.json").write_text(json.dumps(draft, indent=1) + "\n")
    _write_weights(
        head / "model.safetensors", head_weights(sizes), vocabulary(sizes, seed), precision, seed + 1
    )
    return target, head


def target_weights(size: Size) -> dict[str, Weight]:
    """Every tensor of the target's checkpoint.

    A product keeps the spread of its input; what is added to the residual stream is so small that all layers
    together about double it; logits come out with a spread of 1.
    """
    weights = {"model.embed_tokens.weight": Weight((size.vocab, size.hidden), size.hidden**-0.5)}
    for i in range(size.layers):
        weights |= _layer(f"model.layers.{i}.", size, size.hidden, branches=2 * size.layers)
        weights[f"model.layers.{i}.input_layernorm.weight"] = Weight((size.hidden,), None)
    return weights | {"model.norm.weight": Weight((size.hidden,), None)}


def head_weights(size: Size) -> dict[str, Weight]:
    """Every float tensor of the head's checkpoint, whose fc reads three layers of the target."""
    width = (size.hidden,)
    return {
        "fc.weight": Weight((size.hidden, 3 * size.hidden), (3 * size.hidden) ** -0.5),
        "midlayer.hidden_norm.weight": Weight(width, None),
        "midlayer.input_layernorm.weight": Weight(width, None),
        **_layer("midlayer.", size, 2 * size.hidden, branches=2),
        "norm.weight": Weight(width, None),
        "lm_head.weight": Weight((size.draft_vocab, size.hidden), size.hidden**-0.5),
    }


def _layer(prefix: str, size: Size, into: int, *, branches: int) -> dict[str, Weight]:
    """A decoder layer whose attention reads `into` values; `branches` products add to the residual stream."""
    q, kv, small = size.heads * size.head_dim, size.kv_heads * size.head_dim, branches**-0.5
    return {
        f"{prefix}self_attn.q_proj.weight": Weight((q, into), into**-0.5),
        f"{prefix}self_attn.k_proj.weight": Weight((kv, into), into**-0.5),
        f"{prefix}self_attn.v_proj.weight": Weight((kv, into), into**-0.5),
        f"{prefix}self_attn.o_proj.weight": Weight((size.hidden, q), small * q**-0.5),
        f"{prefix}mlp.gate_proj.weight": Weight((size.inner, size.hidden), size.hidden**-0.5),
        f"{prefix}mlp.up_proj.weight": Weight((size.inner, size.hidden), size.hidden**-0.5),
        f"{prefix}mlp.down_proj.weight": Weight((size.hidden, size.inner), small * size.inner**-0.5),
        f"{prefix}post_attention_layernorm.weight": Weight((size.hidden,), None),
    }


def config_of(size: Size) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }


def vocabulary(size: Size, seed: int) -> dict[str, Tensor]:
    """d2t int64 [Vd] (target id minus draft id) and t2d bool [V] of a random ascending draft vocabulary."""
    order = torch.randperm(size.vocab, generator=torch.Generator().manual_seed(seed))
    ids = order[: size.draft_vocab].sort().values
    mask = torch.zeros(size.vocab, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def write_tokenizer(folder: Path) -> None:
    """One token a byte, so that every text has ids in every vocabulary; with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [EOS, "<user>", "<bot>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def _write_weights(
    path: Path, drawn: Mapping[str, Weight], given: Mapping[str, Tensor], precision: str, seed: int
) -> None:
    """A safetensors file, which is a length, a JSON header of offsets, and the values one after another.

    safetensors itself only writes what is all in memory at once.
    """
    dtype, label = BY_PRECISION[precision].torch, BY_PRECISION[precision].safetensors
    entries: dict[str, tuple[str, Sequence[int], int, Callable[[], Iterator[Tensor]]]] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in given.items():  # eight-byte values first: offsets stay aligned
        kind = dtype_of(tensor.dtype).safetensors
        entries[name] = (kind, tensor.shape, tensor.nbytes, lambda tensor=tensor: iter([tensor]))
    for name, weight in drawn.items():
        count = math.prod(weight.shape)
        entries[name] = (
            label,
            weight.shape,
            count * dtype.itemsize,
            lambda weight=weight: _draw(weight, dtype, generator),
        )
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape, length, _) in entries.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, pieces in entries.values():
            for piece in pieces():
                file.write(piece.contiguous().view(torch.uint8).numpy())


def _draw(weight: Weight, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Tensor]:
    """The values of a tensor in pieces [<= _PIECE]."""
    count = math.prod(weight.shape)
    for start in range(0, count, _PIECE):
        length = min(_PIECE, count - start)
        if weight.spread is None:
            yield torch.ones(length, dtype=dtype)
        else:
            yield torch.randn(length, generator=generator).mul_(weight.spread).to(dtype)


@click.command(help=__doc__)
@click.argument("size", type=click.Choice(list(SIZES)))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--precision", type=click.Choice(_PRECISIONS), default="fp16", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(size: str, folder: Path, precision: str, seed: int) -> None:
    target, head = write(folder, size, precision=precision, seed=seed)
    files = {
        str(path.parent): path.stat().st_size for path in (*target.glob("*.safe*"), *head.glob("*.safe*"))
    }
    click.echo(json.dumps(files))


if __name__ == "__main__":
    main()
