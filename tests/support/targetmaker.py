"""Tiny random targets of every supported family, and what Transformers itself says about them.

The reference for a row is never a tree: it is Transformers' own forward over the plain sequence of tokens
that lead to that row, without cache and without any of our code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle_run.backends.base import Graph
from eagle_run.dtypes import DTYPES
from support.familymaker import family_kinds

VOCAB, LAYERS, ROWS = 128, 3, 40  # ROWS: S
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# The first 8 positions of "llama3" are the original context, so that all three of its bands are reached.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=_LLAMA3)),
    "llama-tied": lambda: LlamaForCausalLM(
        LlamaConfig(**_SIZES, rope_parameters=_LINEAR, attention_bias=True, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, rope_parameters=_YARN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=24)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, head_dim=16, sliding_window=None)),
    **family_kinds(_SIZES),
}


def make_model(kind: str) -> Any:
    """A random model in which every part matters: norms are not 1, biases are not 0, logits are spread."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, kind)))
        model = KINDS[kind]().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                elif name.endswith(("bias", "sinks")):
                    weight.uniform_(-0.5, 0.5)
                else:
                    weight.normal_(0.0, 0.6 if "embed" in name else 0.15)
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Seen:
    """logits [V] and features [n * H] of one row."""

    logits: Tensor
    features: Tensor


def plain(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> Seen:
    """What Transformers says after the last of `tokens`."""
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    states = [out.hidden_states[i][0, -1] for i in layers]
    return Seen(out.logits[0, -1].float(), torch.cat(states))


class Runner:
    """A target graph with its bound tensors, one forward at a time; keeps the cache between forwards."""

    def __init__(self, graph: Graph, batch: int) -> None:
        self._graph = graph
        self._batch = batch
        self._cache = {
            tensor.name: torch.zeros([batch, *map(int, tensor.shape[1:])], dtype=DTYPES[tensor.dtype].torch)
            for tensor in graph.spec.inputs
            if tensor.name.startswith("past_")
        }

    def __call__(
        self, ids: Tensor, positions: Tensor, mask: Tensor, write: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ids, positions [B, T]; mask [B, 1, T, KV]; write [B]; index [B, R] -> logits and features."""
        width = int(self._graph.spec.outputs[1].shape[2])
        dtype = DTYPES[self._graph.spec.outputs[1].dtype].torch
        out = {
            "logits": torch.full((self._batch, index.shape[1], VOCAB), torch.nan),
            "features": torch.full((self._batch, ids.shape[1], width), torch.nan, dtype=dtype),
        }
        present = {name.replace("past", "present"): tensor for name, tensor in self._cache.items()}
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "tree_mask": mask,
            "write_index": write,
            "logits_index": index,
        }
        contiguous = {name: tensor.contiguous() for name, tensor in inputs.items()}
        self._graph.bind({**contiguous, **self._cache, **out, **present})()
        return out["logits"], out["features"]

    def extend(self, tokens: Sequence[Sequence[int]], start: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Appends the same number of tokens to each sequence at its own row; logits of every row."""
        ids = torch.tensor(tokens)  # [B, T]
        write = torch.tensor(start)
        positions = write[:, None] + torch.arange(ids.shape[1])
        kv = int(positions.max()) + 1
        mask = torch.arange(kv) <= positions[:, None, :, None]  # [B, 1, T, KV]
        index = torch.arange(ids.shape[1]).expand_as(ids)
        return self(ids, positions, mask, write, index)

    def tree(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[int], start: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """One forward over a tree (parents[0] is -1, parents before children) rooted at row `start`."""
        ids, write = torch.tensor(tokens), torch.tensor(start)
        paths = [path_of(parents, node) for node in range(len(parents))]
        depth = torch.tensor([len(path) - 1 for path in paths])
        kv = int(write.max()) + len(parents)
        mask = torch.arange(kv)[None, None, None, :] < write[:, None, None, None]  # the prefix
        mask = mask.repeat(1, 1, len(parents), 1)
        for b, first in enumerate(start):
            for node, path in enumerate(paths):
                mask[b, 0, node, [first + other for other in path]] = True
        positions = write[:, None] + depth
        return self(ids, positions, mask, write, torch.arange(len(parents)).expand_as(ids))


def path_of(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tokens_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def assert_rows(
    model: Any,
    layers: Sequence[int],
    found: tuple[Tensor, Tensor],
    expected: Mapping[tuple[int, int], Sequence[int]],
    *,
    atol: float,
) -> None:
    """Row (b, t) of `found` must be what Transformers says after the tokens of `expected[b, t]`."""
    logits, features = found
    for (b, t), sequence in expected.items():
        want = plain(model, sequence, layers)
        torch.testing.assert_close(logits[b, t], want.logits, atol=atol, rtol=0)
        torch.testing.assert_close(features[b, t].float(), want.features.float(), atol=atol, rtol=0)
