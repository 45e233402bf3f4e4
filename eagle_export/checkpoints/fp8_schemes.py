"""What a model folder says of its quantisation: which dialect, and whether it is one that we take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_run.errors import EagleError
from eagle_run.json_files import read_json

Config = Mapping[str, Any]
_HINT = (
    "use the model's 16-bit checkpoint (a build in fp8 quantises it), or one in FP8 with scales per tensor "
    "or channel"
)


@dataclass(frozen=True)
class Scheme:
    """A quantisation that we take over. `source` names it in the manifest, `title` for people."""

    source: str
    title: str
    notes: tuple[str, ...] = ()


def find(folder: Path, config: Config) -> Scheme | None:
    """The scheme of a folder with this config.json; None where it names none.

    Raises EagleError, naming the scheme, for every one that is not FP8 W8A8 per tensor or channel.
    """
    own = config.get("quantization_config") or config.get("compression_config")
    separate = folder / "hf_quant_config.json"
    if separate.is_file():
        return _modelopt(_section(_read(separate), separate))
    if own is None:
        return None
    if not isinstance(own, Mapping):
        raise EagleError(f"{folder}: quantization_config should be an object, found {type(own).__name__}")
    method = str(own.get("quant_method", "compressed-tensors" if "config_groups" in own else None))
    if method == "modelopt":
        return _modelopt(own)
    if method == "compressed-tensors":
        return _compressed_tensors(own)
    if method == "fp8":
        return _plain_fp8(own)
    raise _refused(method.upper() if method != "None" else "an unnamed quantisation")


def _modelopt(section: Config) -> Scheme:
    algorithm = str(section.get("quant_algo"))
    if algorithm != "FP8":
        raise _refused(f"ModelOpt's {algorithm}")
    return Scheme("modelopt", "ModelOpt FP8")


def _compressed_tensors(config: Config) -> Scheme:
    title = "compressed-tensors"
    if config.get("transform_config"):
        raise _refused(f"{title} with transforms")
    sparsity = config.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise _refused(f"{title} with {sparsity.get('format')} sparsity")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(f"{title} without config_groups")
    notes: list[str] = []
    for group in groups.values():
        if not isinstance(group, Mapping):  # a preset by name, such as "W4A16"
            raise _refused(f"{title} {group}")
        notes += _check_group(group, str(group.get("format") or config.get("format")))
    return Scheme("compressed-tensors", f"{title} FP8", tuple(dict.fromkeys(notes)))


def _check_group(group: Config, layout: str) -> list[str]:
    """Refuses what is not FP8 weights per tensor or channel with FP8 activations; notes on what differs."""
    weight, activation = group.get("weights"), group.get("input_activations")
    name = f"compressed-tensors {layout} {_describe(weight, activation)}"
    if not isinstance(weight, Mapping) or not _is_fp8(weight):
        raise _refused(name)
    if weight.get("strategy") not in ("tensor", "channel") or not weight.get("symmetric", True):
        raise _refused(f"{name} with {weight.get('strategy')} scales")
    if group.get("output_activations"):
        raise _refused(f"{name} with quantised outputs")
    if activation is None:
        return ["the checkpoint leaves activations in 16 bit; in an fp8 build they are quantised too"]
    if not _is_fp8(activation):
        raise _refused(name)
    if not activation.get("dynamic") and activation.get("strategy", "tensor") != "tensor":
        raise _refused(f"{name} with fixed {activation.get('strategy')} activation scales")
    return []


def _describe(weight: Any, activation: Any) -> str:
    def part(letter: str, args: Any) -> str:
        if not isinstance(args, Mapping):
            return f"{letter}16"
        return f"{letter}{args.get('num_bits')} ({args.get('type')})"

    return f"{part('W', weight)} {part('A', activation)}"


def _is_fp8(args: Config) -> bool:
    return args.get("num_bits") == 8 and args.get("type") == "float"


def _plain_fp8(config: Config) -> Scheme:
    """AutoFP8's and Transformers' own layout."""
    if config.get("weight_block_size"):
        size = "x".join(map(str, config["weight_block_size"]))
        raise EagleError(
            f"the checkpoint is FP8 with one weight scale per block of {size} (DeepSeek's layout); products "
            "of such weights are no plain FP8 product, since the scale changes along the sum",
            hint=_HINT,
        )
    return Scheme("fp8", "FP8")


def _refused(name: str) -> EagleError:
    return EagleError(f"the checkpoint is quantised as {name}, which is not supported", hint=_HINT)


def _section(data: Any, where: Path) -> Config:
    section = data.get("quantization") if isinstance(data, Mapping) else None
    if not isinstance(section, Mapping):
        raise EagleError(f"{where}: expected an object with the key quantization")
    return section


def _read(where: Path) -> Any:
    return read_json(where, hint="download the model again")
