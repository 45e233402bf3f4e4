"""Tensor names: every dialect's to the canonical ones, which are SafeAILab's, and back for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from eagle_export.heads.spec import HeadSpec, Tensors
from eagle_run.errors import EagleError

T = TypeVar("T")
# Copies of the target's weights that a trainer kept for its loss, and buffers that are computed anyway.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")
_BUFFER = "rotary_emb.inv_freq"
_RENAMED = {"draft_id_to_target_id": "d2t"}  # as inference engines call it
_FIRST = "layers.0."


def canonical(tensors: Mapping[str, T]) -> dict[str, T]:
    """Without prefixes, buffers and copies that mean nothing. Raises EagleError for a name twice."""
    renamed: dict[str, T] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        short = _RENAMED.get(short, short)
        if short in _UNUSED or short.endswith(_BUFFER):
            continue
        if short in renamed:
            raise EagleError(
                f"the head's checkpoint holds {short} twice, once as {name}",
                hint="remove one of them; a file that two tools wrote to may mix two heads",
            )
        renamed[short] = tensor
    return renamed


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether a head's first layer takes embedding and hidden apart, whatever that layer is called."""
    return any(name.startswith("midlayer.") or name == f"{_FIRST}hidden_norm.weight" for name in names)


def numbers_its_first_layer(names: Iterable[str]) -> bool:
    """Whether an EAGLE-3 head's first layer is `layers.0`, as ModelOpt and speculators write it."""
    return f"{_FIRST}hidden_norm.weight" in set(names)


def with_midlayer(tensors: Tensors) -> Tensors:
    """EAGLE-3's first layer under its canonical name."""
    if both := sorted(
        n for n in tensors if n.startswith(_FIRST) and f"midlayer.{n[len(_FIRST) :]}" in tensors
    ):
        raise EagleError(
            f"the head's checkpoint has its first layer twice, as midlayer and as {both[0]}",
            hint="remove one of them; a file that two tools wrote to may mix two heads",
        )
    return {
        f"midlayer.{name.removeprefix(_FIRST)}" if name.startswith(_FIRST) else name: tensor
        for name, tensor in tensors.items()
    }


def as_written(names: Iterable[str], spec: HeadSpec) -> list[str]:
    """Canonical names as the checkpoint of this dialect has them, sorted."""
    numbered = spec.dialect in ("modelopt", "speculators")
    return sorted(name.replace("midlayer.", _FIRST) if numbered else name for name in names)
