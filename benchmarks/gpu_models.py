"""Targets and heads of random weights in the sizes of real ones, made on the device, behind eager graphs.

Their answers come in two kinds. As drawn, a token depends on everything before it, with a small lead over the
next best: good for comparing ways to decode. After `steady`, each token of the draft's vocabulary is followed
by the next one of it, with a lead that rounding cannot touch: what a scripted draft proposes then stays right
however the target's rows are grouped. The work is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_measure import MeasuredRounds, wait_all
from benchmarks.scripted_draft import Script, ScriptedDraft
from eagle_export.heads.spec import HeadSpec, default_feature_layers
from eagle_export.models.head import Draft, Fuse
from eagle_export.models.target import TargetModule
from eagle_export.reference.eager import draft_graph, fuse_graph, target_graph
from eagle_run.backends.base import Graph
from eagle_run.backends.stream import on_stream
from eagle_run.engine.engine import Engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.validation import EngineLimits


@dataclass(frozen=True)
class Size:
    """Of a target; its head has one layer of the same widths, as public EAGLE-3 heads have.

    Embedding and lm_head are two matrices in all of them: a step reads one of the two, tied or not.
    """

    vocab: int
    draft_vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rope: dict[str, Any]


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {
    "tiny": Size(640, 320, 8, 64, heads=4, kv_heads=2, head_dim=16, inner=96, rope=_PLAIN_ROPE),
    "tinier": Size(320, 320, 8, 32, heads=2, kv_heads=2, head_dim=16, inner=48, rope=_LLAMA3_ROPE),
    "smollm2-135m": Size(
        49152, 8192, 30, 576, heads=9, kv_heads=3, head_dim=64, inner=1536, rope=_PLAIN_ROPE
    ),
    "llama3.1-8b": Size(
        128256, 32000, 32, 4096, heads=32, kv_heads=8, head_dim=128, inner=14336, rope=_LLAMA3_ROPE
    ),
}


@dataclass(frozen=True)
class Setup:
    """Graphs that can decode, and what there is to know of them; bytes: of the weights that a step reads."""

    name: str
    graphs: dict[str, Graph]
    draft_to_target: Tensor
    vocab: int
    precision: str
    device: torch.device
    max_seq_len: int
    chunk: int
    target_bytes: int
    draft_bytes: int
    max_batch: int = 1 << 30
    max_nodes: int | None = None
    texts: tuple[tuple[int, ...], ...] = ()  # prompts, where random tokens would make no sense

    @property
    def weight_bytes(self) -> float:
        """Of one weight."""
        return {"fp32": 4, "fp8": 1}.get(self.precision, 2)

    def runner(self, batch: int, *, scripted: bool = False) -> tuple[ModelRunner, Script | None]:
        """`batch` slots over the graphs, and with `scripted` the script of their draft."""
        graphs, script = dict(self.graphs), None
        with on_stream(self.device):
            if scripted:
                script = Script(batch, self.max_seq_len + 64, self.draft_to_target, self.vocab, self.device)
                graphs["draft"] = ScriptedDraft(graphs["draft"], script)
            runner = ModelRunner(
                graphs,
                batch=batch,
                draft_to_target=self.draft_to_target,
                device=str(self.device),
                precision=self.precision,
            )
        return runner, script

    def engine(self, runner: ModelRunner, *, capture: bool = True) -> Measured:
        """An engine with a clock on each of its rounds."""
        rounds = MeasuredRounds(self.device, enabled=capture and runner.capturable)
        limits = EngineLimits(self.max_seq_len, self.chunk, self.max_nodes)
        return Measured(Engine(runner, limits, cuda_graphs=rounds), rounds)

    def prompts(self, count: int, length: int, *, seed: int = 0) -> list[tuple[int, ...]]:
        """Random tokens of the draft's vocabulary; prompts of different lengths from `length` down.

        Or `texts` in turns, if there are some, cut to `length`.
        """
        if self.texts:
            return [self.texts[i % len(self.texts)][:length] for i in range(count)]
        generator = torch.Generator().manual_seed(seed)
        known = self.draft_to_target.cpu()
        rows = known[torch.randint(len(known), (count, length), generator=generator)].tolist()
        return [tuple(row[: max(length - 3 * (i % 4), 2)]) for i, row in enumerate(rows)]


@dataclass(frozen=True)
class Measured:
    """An engine and the clock in it."""

    engine: Engine
    rounds: MeasuredRounds


@dataclass(frozen=True, eq=False)
class RandomModel:
    """A target and its head, and the means to decode with them."""

    setup: Setup
    model: Any

    def steady(self) -> None:
        """Makes each token of the draft's vocabulary follow the one before it. In place, once."""
        ids = self.setup.draft_to_target
        weight, embedding = self.model.lm_head.weight, self.model.model.embed_tokens.weight
        with torch.no_grad():
            # A final hidden is the token's embedding and about as much again; 24 gives a logit near 17,
            # where the others have a spread of 1.
            weight.index_add_(0, ids.roll(-1), embedding[ids] * (24 / weight.shape[1]))
        wait_all(self.setup.device)


def random_model(
    name: str, device: torch.device, *, max_seq_len: int, chunk: int, rows: int, dtype: torch.dtype
) -> RandomModel:
    """The model of a key of SIZES. `rows`: what a tree may take in the caches behind the longest text."""
    size = SIZES[name]
    generator = torch.Generator(device).manual_seed(0)
    model = _target(size, device, dtype, generator)
    target = TargetModule(model, default_feature_layers(size.layers)).eval()
    spec = _head(size)
    with torch.device("meta"):
        fuse, draft = Fuse(spec).to(dtype), Draft(spec).to(dtype)
    for module in (fuse, draft):
        module.to_empty(device=device).eval().requires_grad_(False)
    draft.embed_tokens.weight = model.model.embed_tokens.weight
    for module in (fuse, draft):
        _draw(module, 2, generator, skip="embed_tokens")
    ids = torch.randperm(size.vocab, generator=torch.Generator().manual_seed(0))[: size.draft_vocab]
    cache_rows = -(-(max_seq_len + max(rows, chunk)) // 32) * 32
    setup = Setup(
        name=name,
        graphs={
            "target": target_graph(target, cache_rows),
            "fuse": fuse_graph(fuse),
            "draft": draft_graph(draft, cache_rows),
        },
        draft_to_target=ids.sort().values.to(device),
        vocab=size.vocab,
        precision={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
        device=device,
        max_seq_len=max_seq_len,
        chunk=chunk,
        target_bytes=_bytes(model),
        draft_bytes=_bytes(draft) + _bytes(fuse),
    )
    wait_all(device)
    return RandomModel(setup, model)


def _target(size: Size, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=dict(size.rope),
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device).eval().requires_grad_(False)
    with torch.device(device):  # its frequencies are no weights: they are made anew
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    _draw(model, 2 * size.layers, generator)
    return model


def _head(size: Size) -> HeadSpec:
    scaling = {key: value for key, value in size.rope.items() if key not in ("rope_theta",)}
    return HeadSpec(
        algorithm="eagle3",
        dialect="safeai",
        layers=1,
        hidden_size=size.hidden,
        target_hidden_size=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.inner,
        act="silu",
        rms_norm_eps=1e-5,
        vocab_size=size.vocab,
        draft_vocab_size=size.draft_vocab,
        feature_layers=default_feature_layers(size.layers),
        max_positions=131072,
        rope_theta=size.rope["rope_theta"],
        rope_scaling=scaling,
    )


def _draw(module: nn.Module, branches: int, generator: torch.Generator, *, skip: str = "") -> None:
    """Weights that keep the spread of what they are multiplied with, in place.

    The `branches` products that add to the residual stream together add about as much as the embedding.
    """
    for name, weight in module.named_parameters():
        if skip and name.startswith(skip):
            continue
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        elif "embed_tokens" in name:
            weight.data.normal_(generator=generator)
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            spread = weight.shape[1] ** -0.5 * (branches**-0.5 if adds else 1.0)
            weight.data.normal_(std=spread, generator=generator)


def _bytes(module: nn.Module) -> int:
    """Of all weights but the embedding, of which a step reads a few rows."""
    return sum(weight.nbytes for name, weight in module.named_parameters() if "embed_tokens" not in name)
