"""Small material for the trainer's tests: heads, batches, data files, and a target that says something."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_export.heads.load import LoadedHead
from eagle_export.heads.spec import HeadSpec
from eagle_export.models.head import Draft, Fuse, build_head
from eagle_export.train.init import random_weights
from eagle_export.train.prepare import TrainRequest
from eagle_export.train.settings import TrainSettings
from eagle_export.train.ttt import Batch
from support.tiny import Sizes, write_target

VOCAB, WIDTH = 30, 16
TALKS = [[5, 6, 7, 8, 9], [5, 6, 7, 7, 7, 7, 3], [1, 2, 8]]
PROMPTS = [2, 3, 1]
SETTINGS = TrainSettings(
    steps=4,
    draft_vocab=60,
    batch_tokens=512,
    max_updates=60,
    lr=4e-3,
    clip=5.0,
    validation=6,
    eval_every=20,
    save_every=0,
)


def spec_of(algorithm: str = "eagle3", *, draft_vocab: int = 20, **changes: Any) -> HeadSpec:
    eagle3 = algorithm == "eagle3"
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "dialect": "specforge" if eagle3 else "safeai",
        "layers": 1,
        "hidden_size": WIDTH,
        "target_hidden_size": WIDTH,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab if eagle3 else VOCAB,
        "feature_layers": (1, 2) if eagle3 else (3,),
        "max_positions": 256,
        "fc_bias": not eagle3,
    }
    return HeadSpec(**{**values, **changes})


def head_of(spec: HeadSpec, *, seed: int = 0, scale: float = 10.0) -> tuple[Fuse | None, Draft]:
    """A random head whose logits differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: value * (scale if value.dim() > 1 else 1) for name, value in random_weights(spec, seed).items()
    }
    embedding, lm_head = (torch.randn(VOCAB, WIDTH, generator=generator) for _ in range(2))
    ids = torch.arange(spec.draft_vocab_size)
    return build_head(LoadedHead(Path(), spec, tensors, ids), embedding, lm_head)


def batch_of(spec: HeadSpec, lengths: list[int], prompts: list[int], *, seed: int = 1) -> Batch:
    """Random conversations with random features."""
    generator = torch.Generator().manual_seed(seed)
    count, width = len(lengths), max(lengths)
    place = torch.arange(width)
    inside = place < torch.tensor(lengths)[:, None]
    return Batch(
        tokens=torch.randint(0, VOCAB, (count, width), generator=generator) * inside,
        answers=inside & (place >= torch.tensor(prompts)[:, None]),
        features=torch.randn(count, width, spec.feature_width, generator=generator),
        last=torch.randn(count, width, WIDTH, generator=generator),
        best=torch.randint(0, VOCAB, (count, width), generator=generator),
    )


def write_npz(path: Path, conversations: list[list[int]], prompts: list[int]) -> Path:
    np.savez(
        path,
        tokens=np.concatenate([np.array(ids, np.uint16) for ids in conversations]),
        offsets=np.cumsum([0, *map(len, conversations)]).astype(np.int32),
        prompt_lengths=np.array(prompts, np.int16),
        temperature=np.zeros(len(conversations), np.float16),
    )
    return path


class Letters:
    """A target whose hidden states tell what it has seen: token, position, and the sum so far."""

    device = torch.device("cpu")
    dtype = torch.float32
    config = SimpleNamespace(hidden_size=2)
    calls = 0

    def model(self, input_ids: torch.Tensor, **_: Any) -> Any:
        Letters.calls += 1
        place = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        last = torch.stack((input_ids.cumsum(1), place), -1).float()
        states = tuple(torch.stack((input_ids * scale, place), -1).float() for scale in (1, 2, 3))
        return SimpleNamespace(hidden_states=states, last_hidden_state=last)

    def get_output_embeddings(self) -> Any:
        return lambda rows: torch.nn.functional.one_hot(rows[:, 0].long() % 20, 20).float()


def language(count: int, length: int, seed: int) -> Tensor:
    """int64 [count, length]: the next token is decided by the last two, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(4, 60, (80, 2), generator=torch.Generator().manual_seed(99))
    rows = torch.randint(4, 60, (count, length), generator=generator)
    free = torch.rand(count, length, generator=generator) < 0.05
    for at in range(2, length):
        told = table[rows[:, at - 1], rows[:, at - 2] % 2]
        rows[:, at] = torch.where(free[:, at], rows[:, at], told)
    return rows


def write_learned_target(folder: Path, *, updates: int = 250) -> Path:
    """A tiny target that has learnt `language`."""
    from transformers import LlamaForCausalLM

    write_target(folder, Sizes(layers=4, hidden=48, inner=96, positions=256))
    model = LlamaForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(updates):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / updates)
        rows = language(16, 48, seed=step)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    return folder


def answers_by(target: Path, count: int, prompt: int, new: int) -> list[list[int]]:
    """Conversations that the target goes on with at temperature 0, none of which ends early."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target)
    start = language(count, prompt, seed=12345)
    with torch.no_grad():
        out = model.generate(start, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out.tolist()


def request_of(learned: Path, data: Path, out: Path, settings: TrainSettings = SETTINGS) -> TrainRequest:
    return TrainRequest(
        str(learned), (data,), out, settings, features_cache=learned.parent / "features", device="cpu"
    )
