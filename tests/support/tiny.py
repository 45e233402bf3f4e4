"""Tiny random targets and heads on disk, and what is made of them: sessions, decoders, bundles.

A tiny target is a Llama whose layers add a little to an embedding, so its next token depends mostly on the
current one, but on the context too. A *good* head knows the first part (it attends to the token's own
embedding) and is accepted often; a *random* one knows nothing. Both must leave the distribution as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_export.pipeline.build import build
from eagle_export.pipeline.options import BuildOptions
from eagle_export.progress import Progress
from eagle_export.reference import recipe as recipes
from eagle_export.reference.modules import Modules, eager_graphs, load_config, load_fitting_head, load_modules
from eagle_run.engine.engine import Engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.validation import EngineLimits
from eagle_run.tokenizer import Tokenizer

EOS = 1
_SPECIAL = ("<unk>", "</s>", "<user>", "<bot>")
_LETTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'-()\n"
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """Of a tiny target; its head is as wide."""

    vocab: int = 80
    layers: int = 3
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    inner: int = 48
    positions: int = 256


@dataclass(frozen=True)
class Answer:
    """What a request gave, put together."""

    tokens: tuple[int, ...]
    text: str
    reason: str | None


def write_target(folder: Path, sizes: Sizes = Sizes(), *, seed: int = 0) -> Path:
    """A Hugging Face folder: config, random weights, tokenizer with a chat template, generation config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.positions,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                # Logits of a spread near 2: some tokens are likely, many are possible.
                scale = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 2.0 * sizes.hidden**-0.5}
                scaled = torch.randn(weight.shape, generator=generator) * scale.get(name, 0.1)
                weight.copy_(scaled)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    if sizes.vocab > len(_SPECIAL):
        write_tokenizer(folder, sizes.vocab)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One token a character; what the vocabulary does not reach is <unk>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *_LETTERS][:vocab]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_head(
    folder: Path,
    target: Path,
    *,
    kind: str = "eagle3",
    good: bool = True,
    draft_vocab: int | None = None,
    layer_ids: Sequence[int] = (0, 1),
    seed: int = 1,
) -> Path:
    """A head checkpoint for the target in `target`.

    draft_vocab: the first tokens of a random order; None is the whole vocabulary. layer_ids: as SpecForge
    writes them, of layer outputs.
    """
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    width, vocab = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    head = {
        key: config[key]
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    }
    head |= {"model_type": "llama", "num_key_value_heads": config["num_attention_heads"]}
    head |= {"hidden_act": "silu", "max_position_embeddings": 2048, "num_hidden_layers": 1}
    inner = config["intermediate_size"]
    if kind == "eagle1":
        prefix, tensors = "layers.0.", {"fc.weight": draw(width, 2 * width)}
        if good:  # the embedding goes straight through
            tensors["fc.weight"] = torch.cat((torch.eye(width), draw(width, width, scale=0.02)), 1)
        head["bias"] = False
    else:
        ids = _draft_ids(vocab, draft_vocab, seed)
        prefix, tensors = (
            "midlayer.",
            {
                "fc.weight": draw(width, len(layer_ids) * width, scale=0.02 if good else 0.2),
                "midlayer.input_layernorm.weight": torch.ones(width),
                "midlayer.hidden_norm.weight": torch.ones(width),
                "norm.weight": torch.ones(width),
                "lm_head.weight": weights["lm_head.weight"][ids] if good else draw(len(ids), width),
            },
        )
        if draft_vocab is not None:
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        head |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab or vocab}
        head["norm_output"] = good  # fed back as it is, a hidden grows from draft to draft
        head["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(layer_ids),
            "use_aux_hidden_state": True,
        }
    into = width if kind == "eagle1" else 2 * width
    for key in "qkv":
        tensors[f"{prefix}self_attn.{key}_proj.weight"] = draw(width, into)
    tensors[f"{prefix}self_attn.o_proj.weight"] = draw(width, width)
    tensors[f"{prefix}mlp.gate_proj.weight"] = draw(inner, width)
    tensors[f"{prefix}mlp.up_proj.weight"] = draw(inner, width)
    tensors[f"{prefix}mlp.down_proj.weight"] = draw(width, inner)
    tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(width)
    if good:
        tensors[f"{prefix}mlp.down_proj.weight"] *= 0.1
        if kind == "eagle1":
            tensors[f"{prefix}self_attn.o_proj.weight"] *= 0.1
        else:  # a token's query finds its own embedding, whose value comes out as it is
            own = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
            for key, scale in (("q", 3.0), ("k", 3.0), ("v", 1.0)):
                tensors[f"{prefix}self_attn.{key}_proj.weight"] = own * scale
            tensors[f"{prefix}self_attn.o_proj.weight"] = torch.eye(width)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _draft_ids(vocab: int, draft_vocab: int | None, seed: int) -> Tensor:
    """i64 [Vd]: the target ids of a draft vocabulary, ascending."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    return order[: draft_vocab or vocab].sort().values


def modules_of(target: Path, head: Path | None = None) -> Modules:
    """Target and head as the exporter loads them."""
    found = recipes.resolve_target(str(target))
    config = load_config(found, 64)
    loaded = None if head is None else load_fitting_head(recipes.resolve_head(str(head), found), config)
    return load_modules(found, loaded, torch.float32)


def eager_engine(
    modules: Modules,
    *,
    batch: int = 1,
    max_seq_len: int = 128,
    chunk: int = 16,
    extra_rows: int = 64,
    tokenizer: Tokenizer | None = None,
    max_tree_nodes: int | None = None,
) -> Engine:
    """The whole loop on the eager backend."""
    runner = ModelRunner(
        eager_graphs(modules, max_seq_len + extra_rows),
        batch=batch,
        draft_to_target=modules.draft_to_target,
    )
    return Engine(runner, EngineLimits(max_seq_len, chunk, max_tree_nodes), tokenizer=tokenizer)


def build_bundle(target: Path, head: Path | str, out: Path, **options: object) -> Path:
    """A real bundle, through the whole pipeline."""
    limits: dict[str, object] = {
        "max_seq_len": 128,
        "prefill_chunk": 16,
        "max_tree_nodes": 32,
        "max_batch": 4,
    }
    tree: dict[str, object] = (
        {} if head == "none" else {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 10}
    )
    chosen = {**limits, **tree, **options}
    build(BuildOptions(target=str(target), head=str(head), out=out, **chosen), Progress(quiet=True))  # type: ignore[arg-type]
    return out
