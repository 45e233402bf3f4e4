"""The options that several commands of eagle-export share. Imports nothing heavy: `--help` must be fast."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from eagle_export.engines.request import COMPATIBILITIES
from eagle_export.pipeline.options import (
    BACKENDS,
    PRECISIONS,
    PROFILES,
    BuildOptions,
    EngineOptions,
    Fp8Options,
)
from eagle_run.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)


def option_of(
    settings: type, name: str, help_: str | None, *spellings: str, **attributes: Any
) -> Callable[[F], F]:
    """The option that fills the field `name` of a dataclass: spelled like it, and with the field's default.

    spellings: what it is called instead, the usual name first. attributes: of click.option, above all `type`.
    A field that is False becomes a flag, and a tuple an option that may be repeated.
    """
    (default,) = (field.default for field in fields(settings) if field.name == name)
    spellings = spellings or (f"--{name.replace('_', '-')}",)
    if default is False:
        attributes = {"is_flag": True} | attributes
    elif default == ():
        attributes = {"multiple": True} | attributes
    elif default is not MISSING and default is not None:
        attributes = {"default": default, "show_default": True} | attributes
    return click.option(*spellings, name, help=help_, **attributes)


def common(function: F) -> F:
    """--debug, which every command takes and `run_cli` acts upon."""
    option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
    return option(function)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on standard output."
)


def _within_cores(_context: click.Context, _option: click.Parameter, threads: int) -> int:
    """Refuses more threads than cores before the command begins."""
    from eagle_run.backends.environment import thread_count

    thread_count(threads)
    return threads


threads_option = click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    callback=_within_cores,
    help="CPU threads; 0 takes one per core.",
)

fresh_option = click.option(
    "--fresh", is_flag=True, help="Start over, also where an interrupted run left finished parts."
)


def engine_options(default_backend: str | None) -> Callable[[F], F]:
    """What to compile for: shared by build and compile. `take_engine` collects them."""
    backend = {"default": default_backend} if default_backend else {"default": None, "required": True}
    names = {"multiple": False, "metavar": "NAME,NAME"}
    options = [
        option_of(
            EngineOptions,
            "backend",
            "What will run the graphs.",
            type=click.Choice([name for name in BACKENDS if default_backend or name != "onnxruntime"]),
            **backend,
        ),
        option_of(
            EngineOptions,
            "target_arch",
            "GPUs that a tensorrt-rtx engine is for, e.g. sm89,sm120 (the default).",
            **names | {"metavar": "SM,SM"},
        ),
        option_of(
            EngineOptions,
            "profiles",
            f"Shapes to tune kernels for, of {', '.join(PROFILES)}. Default: all that a graph uses.",
            **names,
        ),
        option_of(
            EngineOptions,
            "workspace",
            "Most scratch memory of a kernel.",
            type=click.IntRange(1, 1 << 24),
            metavar="MIB",
        ),
        option_of(
            EngineOptions,
            "optimization_level",
            "Effort of the compiler.",
            type=click.IntRange(0, 5),
            metavar="0-5",
        ),
        option_of(
            EngineOptions,
            "hardware_compatibility",
            "tensorrt only: other GPUs that the engine may run on, at some cost in speed.",
            "--hardware-compat",
            type=click.Choice(COMPATIBILITIES),
        ),
        option_of(EngineOptions, "version_compatible", "tensorrt only: let later versions run it too."),
        option_of(
            EngineOptions,
            "timing_cache",
            "tensorrt only: file of kernel timings to reuse and extend.",
            type=_FILE,
        ),
    ]
    return lambda function: apply_options(options, function)


def fp8_options(function: F) -> F:
    """How FP8 is made. `take_fp8` collects them."""
    options = [
        option_of(
            Fp8Options,
            "keep",
            "fp8: linear layers to leave in 16 bit, e.g. '*.down_proj'. May be repeated; "
            "`eagle-export sensitivity` says which are worth it.",
            "--keep-16bit",
            metavar="PATTERN",
        ),
        option_of(
            Fp8Options,
            "lm_head",
            "fp8: quantise lm_head too, if its weight is not shared with the embedding.",
            "--quantize-lm-head",
        ),
        option_of(
            Fp8Options, "fuse", "fp8: quantise the product over target features too.", "--quantize-fuse"
        ),
        option_of(
            Fp8Options,
            "base",
            "fp8: type of everything else.",
            "--fp8-base",
            type=click.Choice(("fp16", "bf16")),
        ),
        option_of(
            Fp8Options, "scales", "fp8: scales of an earlier calibration of the same weights.", type=_FILE
        ),
        option_of(
            Fp8Options,
            "prompts",
            'fp8: prompts to calibrate on, one JSON object a line, {"turns": ["..."]}. '
            "Default: some of our own.",
            "--calibration",
            type=_FILE,
        ),
    ]
    return apply_options(options, function)


def take_engine(values: dict[str, Any]) -> EngineOptions:
    """Takes the options of `engine_options` out of a command's values."""
    taken = {field.name: values.pop(field.name) for field in fields(EngineOptions)}
    for name in ("target_arch", "profiles"):
        taken[name] = _names(taken[name], name)
    return EngineOptions(**taken)


def take_fp8(values: dict[str, Any]) -> Fp8Options:
    """Takes the options of `fp8_options` out of a command's values."""
    return Fp8Options(**{field.name: values.pop(field.name) for field in fields(Fp8Options)})


def _names(value: str | None, parameter: str) -> tuple[str, ...]:
    names = () if value is None else tuple(part.strip() for part in value.split(","))
    if not all(names):
        raise UsageError(f"expected names with commas between them, found {value!r}", parameters=[parameter])
    return names


def layer_numbers(value: str | None, parameter: str) -> tuple[int, ...] | None:
    """ "2,15,27" -> (2, 15, 27). Raises UsageError, naming the command's parameter, for anything else."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise UsageError(
            f"expected numbers with commas between them, found {value!r}",
            hint="for example 2,15,27",
            parameters=[parameter],
        ) from None


def apply_options(options: Sequence[Callable[[F], F]], function: F) -> F:
    """A command with these options, which `--help` lists in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def source_options(function: F) -> F:
    """What to build from, and for which sizes: shared by build and export."""
    count = {"type": int, "metavar": "N"}
    options = [
        option_of(
            BuildOptions,
            "target",
            "The model: a recipe (see `eagle-export recipes`), a local Hugging Face folder, "
            "or a hub id such as org/name.",
            required=True,
        ),
        option_of(
            BuildOptions,
            "head",
            "The draft head: eagle3 or eagle1 (the recipe's), a folder, a hub id, or none.",
        ),
        option_of(
            BuildOptions,
            "head_layer_ids",
            "Target layers that the head reads, as indices into Transformers' hidden_states. "
            "Only for heads that do not say it, or say it wrongly.",
            "--head-layer-ids",
            "--layer-ids",
            metavar="I,J,K",
        ),
        option_of(
            BuildOptions,
            "head_set",
            "Read the head otherwise than its config.json says, e.g. norm_output=false; "
            "docs/heads.md lists the names, and `verify` says which one helps. May be repeated.",
            metavar="NAME=VALUE",
        ),
        option_of(BuildOptions, "out", "Where to write.", type=click.Path(path_type=Path)),
        option_of(
            BuildOptions,
            "link_weights",
            "Do not copy weights that the checkpoint holds in this precision: hard links to its files "
            "take their place.",
        ),
        option_of(
            BuildOptions,
            "precision",
            "Of weights and caches; fp8 is of linear layers, the rest has 16 bit. "
            "Default: fp32 for onnxruntime, fp16 for engines.",
            type=click.Choice(PRECISIONS),
            default=None,
        ),
        option_of(BuildOptions, "max_seq_len", "Longest prompt and answer together, in tokens.", **count),
        option_of(BuildOptions, "max_batch", "Most prompts that are decoded side by side.", **count),
        option_of(BuildOptions, "prefill_chunk", "Most prompt tokens in one forward.", **count),
        option_of(BuildOptions, "max_tree_nodes", "Largest draft tree, its root included.", **count),
        option_of(
            BuildOptions,
            "tree",
            "The bundle's own draft tree: chain:D, dynamic:D,K,N (depth, top-k, nodes with the root), "
            "static:P,P,... (parents) or a file. It can be changed when decoding.",
            metavar="TREE",
        ),
        # The old way, still understood: a kind, and its sizes as options.
        option_of(BuildOptions, "depth", None, hidden=True, **count),
        option_of(BuildOptions, "top_k", None, "--branch", "--tree-top-k", hidden=True, **count),
        option_of(BuildOptions, "nodes", None, hidden=True, **count),
        threads_option,
        json_option,
        common,
    ]
    return apply_options(options, function)


def check_target(target: str, *, bundles: bool = False) -> None:
    """Refuses a target whose name means nothing before torch is loaded, which takes seconds.

    bundles: whether it may be the folder of a bundle. Raises UsageError, and EagleError for a faulty recipe,
    config or manifest.
    """
    from eagle_export.reference.recipe import find_target
    from eagle_run.bundle.loading import MANIFEST, read_manifest

    if bundles and os.path.isfile(Path(target) / MANIFEST):
        read_manifest(Path(target))
    else:
        find_target(target)


def check_lines(paths: Sequence[Path]) -> None:
    """Refuses files of JSON lines that are not there, or whose first line is something else."""
    from eagle_run.datasets import read_lines

    for path in paths:
        next(read_lines(path), None)


def use_threads(threads: int) -> None:
    """Of torch, for what is computed in eager mode; 0 leaves its default."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def print_rich(renderable: Any) -> None:
    """To standard output, as wide as a terminal or, where there is none, as wide as needed."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe has no width to fit into
    console.print(renderable)
