"""Where training starts: the spec of a new head for a target, and its first weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_export.heads.safeai import ACTIVATIONS, ROPE_TYPES
from eagle_export.heads.spec import HeadSpec, Tensors, default_feature_layers, expected_shapes
from eagle_export.models.families import norm_weight, rope_of
from eagle_export.models.target import TargetDims, target_dims
from eagle_export.train.settings import TrainSettings
from eagle_run.errors import UsageError

_SPREAD = 0.02  # standard deviation of random weights


def feature_layers(settings: TrainSettings, layers: int) -> tuple[int, ...]:
    """The layers that a new head reads, in hidden_states' numbering.

    Where a target is too shallow for EAGLE-3's three, as many of its layers as there are from the second on.
    """
    if settings.layers is not None:
        chosen = settings.layers
        if settings.algorithm == "eagle1":
            raise UsageError(
                "an EAGLE-1 head reads the last hidden state alone",
                hint="leave the layers out",
                parameters=["layers"],
            )
        if list(chosen) != sorted(set(chosen)) or not all(0 <= layer < layers for layer in chosen):
            raise UsageError(
                f"layers {list(chosen)} do not fit a target of {layers} layers: ascending numbers from 0 to "
                f"{layers - 1} are expected",
                parameters=["layers"],
            )
        return chosen
    if settings.algorithm == "eagle1":
        return (layers,)
    if settings.features == "top":
        return (layers - 1,)
    usual = default_feature_layers(layers)
    if 0 < usual[0] < usual[1] < usual[2]:
        return usual
    return tuple(range(min(1, layers - 1), layers))[-3:]


def new_spec(config: Any, settings: TrainSettings, draft_vocab: int) -> HeadSpec:
    """A head as wide as its target, with one layer like the target's and the target's rotation.

    What no head has is left out: a rotation of part of each head, and scalings that depend on the length.
    """
    dims: TargetDims = target_dims(config)
    rope = rope_of(config)
    theta = float(rope.pop("rope_theta", 10000.0))
    rope.pop("partial_rotary_factor", None)
    eagle3 = settings.algorithm == "eagle3"
    kv_heads = settings.kv_heads or dims.kv_heads
    if dims.heads % kv_heads:
        raise UsageError(
            f"kv_heads is {kv_heads}, expected a divisor of the target's {dims.heads} heads",
            parameters=["kv_heads"],
        )
    scaled = rope.get("rope_type") in ROPE_TYPES
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    return HeadSpec(
        algorithm=settings.algorithm,
        dialect="specforge" if eagle3 else "safeai",
        layers=1,
        hidden_size=dims.hidden_size,
        target_hidden_size=dims.hidden_size,
        heads=dims.heads,
        kv_heads=kv_heads,
        head_dim=dims.head_dim,
        intermediate_size=config.intermediate_size,
        act=act if act in ACTIVATIONS else ACTIVATIONS[0],
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=dims.vocab_size,
        draft_vocab_size=draft_vocab if eagle3 else dims.vocab_size,
        feature_layers=feature_layers(settings, dims.layers),
        max_positions=dims.max_positions,
        rope_theta=theta,
        rope_scaling=rope if scaled else {},
        fc_bias=not eagle3,
    )


def random_weights(spec: HeadSpec, seed: int) -> Tensors:
    """Every tensor of the spec: norms 1, biases 0, matrices normal."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in expected_shapes(spec).items():
        if name.endswith("bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * _SPREAD
    return tensors


def weights_from_target(spec: HeadSpec, model: Any, ids: Tensor, seed: int) -> Tensors:
    """First weights taken from the target, where that helps: all but the layer, which is random.

    fc averages the features and the layer changes little, so norm and lm_head (rows `ids`, int64 [Vd]) of the
    target read about what they were made for. (A layer taken from the target, its first or its last, learns
    more slowly than a random one: its job is another.)
    """
    tensors = random_weights(spec, seed)
    width, count = spec.hidden_size, len(spec.feature_layers)
    if spec.algorithm == "eagle1":  # the feature passes
        tensors["fc.weight"][:, width:] = torch.eye(width)
        return tensors
    tensors["norm.weight"] = norm_weight(model.config, _copy(model.model.norm.weight))
    tensors["lm_head.weight"] = _copy(model.get_output_embeddings().weight[ids])
    tensors["fc.weight"] = torch.eye(width).repeat(1, count) / count
    return tensors


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.float32).clone()
