"""What a training run is asked for. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eagle_run.errors import UsageError

ALGORITHMS = ("eagle3", "eagle1")
FEATURES = ("fused", "top")
LOSSES = ("distribution", "regression", "hass")
PRECISIONS = ("auto", "fp32", "bf16")
# What may differ when a run is resumed: it changes neither the updates made so far nor the next ones.
_FREE = ("eval_every", "save_every", "keep")
MAKE_DATA = "make the data again with `eagle-export data`"


def check_sources(sources: Sequence[Path]) -> None:
    """Raises UsageError for a source of training data that is neither a folder nor an .npz file."""
    for source in sources:
        if not os.path.isdir(source) and not (source.suffix == ".npz" and os.path.isfile(source)):
            raise UsageError(f"{source}: neither a data folder nor an .npz file", hint=MAKE_DATA)


@dataclass(frozen=True)
class TrainSettings:
    """One training run; together with target and data it decides every weight.

    steps        unrolled steps K of training-time test; 1 is without it.
    decay        step i counts decay**i.
    loss         "distribution": soft cross-entropy against the target's distribution over the draft
                 vocabulary (EAGLE-3). "regression": SmoothL1 on the target's last hidden state, plus
                 `ce_weight` times that cross-entropy (EAGLE-1). "hass": both, and cross-entropy over
                 the target's `top_tokens` best tokens (HASS's top-K distillation).
    features     "fused": three layers of the target; "top": the last one alone.
    batch_tokens tokens of the conversations in one forward and backward, padding included.
    accumulate   forwards and backwards per update.
    warmup       share of all updates over which the learning rate rises.
    layers       indices into Transformers' hidden_states; None takes those that `features` says.
    kv_heads     of the head's attention; None takes the target's. All of the token passes through them.
    """

    algorithm: str = "eagle3"
    steps: int = 7
    decay: float = 0.8
    loss: str = "distribution"
    features: str = "fused"
    layers: tuple[int, ...] | None = None
    draft_vocab: int = 8192
    kv_heads: int | None = None
    batch_tokens: int = 4096
    accumulate: int = 1
    max_length: int = 2048
    epochs: int = 10
    max_updates: int | None = None
    lr: float = 5e-4
    warmup: float = 0.015
    weight_decay: float = 0.0
    clip: float = 0.5
    average: float = 0.0
    freeze_lm_head: bool = False
    noise: float = 0.0
    ce_weight: float = 0.1
    top_tokens: int = 10
    validation: int = 64
    eval_every: int = 200
    save_every: int = 200
    keep: int = 2
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("algorithm", ALGORITHMS),
            ("loss", LOSSES),
            ("features", FEATURES),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name in ("steps", "draft_vocab", "batch_tokens", "accumulate", "epochs", "eval_every", "keep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected a positive number")
        if not self.lr > 0:
            raise UsageError(f"lr is {self.lr}, expected a positive number")
        if not 0 <= self.average < 1:
            raise UsageError(f"average is {self.average}, expected 0 (none) up to but not including 1")

    @property
    def regresses(self) -> bool:
        """Whether the head's output is held to the target's last hidden state."""
        return self.loss != "distribution"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """What a run with `other` settings would do differently, as "name: theirs, ours" lines."""
        mine = self.as_dict()
        lines = []
        for field in fields(self):
            theirs, ours = other.get(field.name), mine[field.name]
            theirs = tuple(theirs) if isinstance(theirs, list) else theirs
            if field.name not in _FREE and theirs != ours:
                lines.append(f"{field.name}: was {theirs}, is {ours}")
        return lines
