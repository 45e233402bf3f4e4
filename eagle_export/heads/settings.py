"""What overrides a head's own config.json: a caller's layer ids and settings, and those of recipes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    from eagle_export.heads.spec import HeadSpec

_SWITCHES = {"true": True, "false": False}
NO_SCALING = "none"


@dataclass(frozen=True)
class HeadSettings:
    """None leaves the checkpoint's word.

    layer_ids     indices into Transformers' `hidden_states`, or one more (see heads/spec.py).
    rope_theta    the base that the head was trained with.
    rope_scaling  "none": the head was trained with plain RoPE, whatever was written for inference.
    The switches are those of HeadSpec.
    """

    layer_ids: tuple[int, ...] | None = None
    rope_theta: float | None = None
    rope_scaling: str | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    norm_hidden_twice: bool | None = None

    def over(self, other: HeadSettings) -> HeadSettings:
        """These settings, and the other's where these say nothing."""
        return replace(other, **self._said())

    def apply(self, spec: HeadSpec) -> HeadSpec:
        """The spec as the person says it is. Raises EagleError for what a head of this kind does not have."""
        changes = self._said()
        if "layer_ids" in changes:
            changes["feature_layers"] = changes.pop("layer_ids")
        if "rope_scaling" in changes:
            changes["rope_scaling"] = {}
        if spec.algorithm == "eagle1" and (switches := sorted(set(changes) & set(SWITCHES))):
            raise EagleError(
                f"{switches[0]} is set for an EAGLE-1 head, which has no such norm",
                hint="leave that setting out",
                parameters=["head_set"],
            )
        return replace(spec, **changes)

    def texts(self) -> tuple[str, ...]:
        """NAME=VALUE of everything that is set but for the layers, as `parse_settings` reads it."""
        values = self._said()
        return tuple(f"{name}={_written(value)}" for name, value in values.items() if name != "layer_ids")

    def _said(self) -> dict[str, Any]:
        return {f.name: said for f in fields(self) if (said := getattr(self, f.name)) is not None}


UNSAID = HeadSettings()
SWITCHES = ("norm_output", "norm_before_residual", "norm_hidden_twice")
NAMES = (*SWITCHES, "rope_theta", "rope_scaling")


def parse_settings(texts: Iterable[str]) -> HeadSettings:
    """Settings from NAME=VALUE texts. Raises UsageError for an unknown name, a wrong value, a name twice."""
    values: dict[str, bool | float | str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in NAMES:
            raise UsageError(
                f"a setting of a head should be NAME=VALUE with one of {', '.join(NAMES)}; found {text!r}",
                hint="for example norm_output=false",
                parameters=["head_set"],
            )
        if name in values:
            raise UsageError(f"{name} of the head is set twice", parameters=["head_set"])
        values[name] = _parsed(name, value)
    return HeadSettings(**values)  # type: ignore[arg-type]


def _parsed(name: str, value: str) -> bool | float | str:
    if name in SWITCHES:
        if value.lower() not in _SWITCHES:
            raise UsageError(
                f"{name} of the head should be true or false, found {value!r}", parameters=["head_set"]
            )
        return _SWITCHES[value.lower()]
    if name == "rope_scaling":
        if value.lower() != NO_SCALING:
            raise UsageError(
                f"rope_scaling of the head can only be {NO_SCALING}, found {value!r}",
                hint="another scaling belongs into the head's config.json",
                parameters=["head_set"],
            )
        return NO_SCALING
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(
            f"{name} of the head should be a positive number, found {value!r}", parameters=["head_set"]
        )
    return number


def _written(value: bool | float | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}" if float(f"{value:g}") == value else repr(value)
