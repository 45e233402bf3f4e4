"""Damaged heads: whatever is in config.json and the weights, a head is read or refused, never a traceback."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dialects import as_dialect
from support.headmaker import RECIPES, Head, make_head

from eagle_export.heads.load import load_head
from eagle_run.errors import EagleError

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 1.5, 1e30, 10**30, float("inf"), "", "llama", "yes"),
    *([], [1], [1, 2, 9], [True, 2, 3], ["a", None], [[1]]),
    *({}, {"a": 1}, {"rope_type": "yarn", "factor": None}, {"type": "llama3"}, {"rope_type": []}),
)
KEYS = (
    *("hidden_size", "vocab_size", "draft_vocab_size", "rope_scaling", "rope_parameters", "layer_types"),
    *("architectures", "eagle_config", "speculators_config", "transformer_layer_config", "sliding_window"),
    *("norm_output", "head_dim", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
    *("quantization_config", "rms_norm_eps", "max_position_embeddings"),
)
PREFIXES = ("", "model.", "x.", "layers.0.", "midlayer.", "layers.99.")


def places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every key of a config and of the objects in it."""
    found = [(config, key) for key in config]
    for value in config.values():
        if isinstance(value, dict):
            found += places(value)
    return found


def damage_config(config: dict[str, Any], draw: random.Random) -> None:
    owner, key = draw.choice(places(config) or [(config, "x")])
    action = draw.random()
    if action < 0.25:
        owner.pop(key, None)
    elif action < 0.8:
        owner[key] = draw.choice(VALUES)
    else:
        draw.choice([config, owner])[draw.choice(KEYS)] = draw.choice(VALUES)


def damage_tensors(tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    action = draw.randrange(6)
    if action == 0:
        del tensors[name]
    elif action == 1:
        new = (
            draw.choice(["", "model.", "x.", "layers.0.", "midlayer.", "layers.99."]) + name.split(".", 1)[-1]
        )
        tensors[new] = tensors.pop(name)
    elif action == 2:
        tensors[name] = tensor.reshape(-1)[: draw.randrange(1 + tensor.numel())].clone()
    elif action == 3:
        tensors[name] = tensor.to(draw.choice([torch.int8, torch.bool, torch.float64, torch.bfloat16]))
    elif action == 4:
        tensors[name] = tensor.unsqueeze(0).clone()
    elif tensor.is_floating_point():
        tensors[name] = torch.full_like(tensor, float("nan"))
    else:
        tensors[name] = tensor + draw.choice([1, -1000, 1 << 62])


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_damaged_heads(kind: str, tmp_path: Path) -> None:
    head = make_head(RECIPES[kind])
    config, tensors = as_dialect(head.dialect, head.config, head.tensors)
    read, refused = 0, []
    for seed in range(60):
        draw = random.Random(f"{kind} {seed}")
        some_config, some = copy.deepcopy(config), dict(tensors)
        for _ in range(draw.choice([1, 1, 2, 4])):
            if draw.random() < 0.6:
                damage_config(some_config, draw)
            elif some:
                damage_tensors(some, draw)
        damaged: Head = replace(head, config=some_config, tensors=some, dialect="")
        try:
            load_head(damaged.write(tmp_path / str(seed)), head.target)
            read += 1
        except EagleError as error:
            refused.append(error.message)
    assert len(refused) > 10
    assert all(0 < len(message) < 2000 for message in refused)
    assert read > 0  # some damage means nothing
