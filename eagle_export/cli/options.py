"""The options that several commands of eagle-export share. Imports nothing heavy: `--help` must be fast."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from eagle_export.engines.request import COMPATIBILITIES
from eagle_export.pipeline.options import (
    BACKENDS,
    ENGINE_FLAGS,
    PRECISIONS,
    PROFILES,
    TREE_KINDS,
    EngineOptions,
    Fp8Options,
)
from eagle_run.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


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
    options = [
        click.option(
            "--backend",
            type=click.Choice([name for name in BACKENDS if default_backend or name != "onnxruntime"]),
            **({"default": default_backend, "show_default": True} if default_backend else {"required": True}),
            help="What will run the graphs.",
        ),
        click.option(
            "--target-arch",
            metavar="SM,SM",
            help="GPUs that a tensorrt-rtx engine is for, e.g. sm89,sm120 (the default).",
        ),
        click.option(
            "--profiles",
            metavar="NAME,NAME",
            help=f"Shapes to tune kernels for, of {', '.join(PROFILES)}. Default: all that a graph uses.",
        ),
        click.option(
            "--workspace",
            type=click.IntRange(1, 1 << 24),
            metavar="MIB",
            help="Most scratch memory of a kernel.",
        ),
        click.option(
            "--optimization-level", type=click.IntRange(0, 5), metavar="0-5", help="Effort of the compiler."
        ),
        click.option(
            "--hardware-compat",
            "hardware_compatibility",
            type=click.Choice(COMPATIBILITIES),
            default="none",
            show_default=True,
            help="tensorrt only: other GPUs that the engine may run on, at some cost in speed.",
        ),
        click.option(
            "--version-compatible",
            is_flag=True,
            help="tensorrt only: let later versions run it too.",
        ),
        click.option(
            "--timing-cache",
            type=click.Path(path_type=Path, dir_okay=False),
            help="tensorrt only: file of kernel timings to reuse and extend.",
        ),
    ]
    return lambda function: _apply(options, function)


def fp8_options(function: F) -> F:
    """How FP8 is made. `take_fp8` collects them."""
    options = [
        click.option(
            "--keep-16bit",
            "keep",
            multiple=True,
            metavar="PATTERN",
            help="fp8: linear layers to leave in 16 bit, e.g. '*.down_proj'. May be repeated; "
            "`eagle-export sensitivity` says which are worth it.",
        ),
        click.option(
            "--quantize-lm-head",
            "lm_head",
            is_flag=True,
            help="fp8: quantise lm_head too, if its weight is not shared with the embedding.",
        ),
        click.option(
            "--quantize-fuse",
            "fuse",
            is_flag=True,
            help="fp8: quantise the product over target features too.",
        ),
        click.option(
            "--fp8-base",
            "base",
            type=click.Choice(("fp16", "bf16")),
            default="fp16",
            show_default=True,
            help="fp8: type of everything else.",
        ),
        click.option(
            "--scales",
            type=click.Path(path_type=Path, dir_okay=False),
            help="fp8: scales of an earlier calibration of the same weights.",
        ),
        click.option(
            "--calibration",
            "prompts",
            type=click.Path(path_type=Path, dir_okay=False),
            help='fp8: prompts to calibrate on, one JSON object a line, {"turns": ["..."]}. '
            "Default: some of our own.",
        ),
    ]
    return _apply(options, function)


def take_engine(values: dict[str, Any]) -> EngineOptions:
    """Takes the options of `engine_options` out of a command's values."""
    taken = {name: values.pop(name) for name in ("backend", *ENGINE_FLAGS)}
    for name in ("target_arch", "profiles"):
        taken[name] = _names(taken[name], ENGINE_FLAGS[name])
    return EngineOptions(**taken)


def take_fp8(values: dict[str, Any]) -> Fp8Options:
    """Takes the options of `fp8_options` out of a command's values."""
    return Fp8Options(
        **{name: values.pop(name) for name in ("keep", "lm_head", "fuse", "base", "scales", "prompts")}
    )


def _names(value: str | None, flag: str) -> tuple[str, ...]:
    names = () if value is None else tuple(part.strip() for part in value.split(","))
    if not all(names):
        raise UsageError(f"--{flag} should be names with commas between them, found {value!r}")
    return names


def _apply(options: Sequence[Callable[[F], F]], function: F) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def source_options(function: F) -> F:
    """What to build from, and for which sizes: shared by build and export."""
    options = [
        click.option(
            "--target",
            required=True,
            help="The model: a recipe (see `eagle-export recipes`), a local Hugging Face folder, "
            "or a hub id such as org/name.",
        ),
        click.option(
            "--head",
            default="eagle3",
            show_default=True,
            help="The draft head: eagle3 or eagle1 (the recipe's), a folder, a hub id, or none.",
        ),
        click.option(
            "--head-layer-ids",
            "--layer-ids",
            "head_layer_ids",
            metavar="I,J,K",
            help="Target layers that the head reads, as indices into Transformers' hidden_states. "
            "Only for heads that do not say it, or say it wrongly.",
        ),
        click.option(
            "--head-set",
            "head_set",
            multiple=True,
            metavar="NAME=VALUE",
            help="Read the head otherwise than its config.json says, e.g. norm_output=false; "
            "docs/heads.md lists the names, and `verify` says which one helps. May be repeated.",
        ),
        click.option("--out", type=click.Path(path_type=Path), help="Where to write."),
        click.option(
            "--link-weights",
            is_flag=True,
            help="Do not copy weights that the checkpoint holds in this precision: hard links to its files "
            "take their place.",
        ),
        click.option(
            "--precision",
            type=click.Choice(PRECISIONS),
            help="Of weights and caches; fp8 is of linear layers, the rest has 16 bit. "
            "Default: fp32 for onnxruntime, fp16 for engines.",
        ),
        click.option(
            "--max-seq-len", type=int, metavar="N", help="Longest prompt and answer together, in tokens."
        ),
        click.option(
            "--max-batch", type=int, metavar="N", help="Most prompts that are decoded side by side."
        ),
        click.option("--prefill-chunk", type=int, metavar="N", help="Most prompt tokens in one forward."),
        click.option(
            "--max-tree-nodes", type=int, metavar="N", help="Largest draft tree, its root included."
        ),
        click.option(
            "--tree",
            type=click.Choice(TREE_KINDS),
            help="Kind of the default draft tree; it can be changed when decoding.",
        ),
        click.option("--depth", type=int, metavar="N", help="Most drafted tokens in a row."),
        click.option(
            "--branch", "--tree-top-k", "top_k", type=int, metavar="N", help="Most children of a node."
        ),
        click.option("--nodes", type=int, metavar="N", help="Nodes that the target verifies, root included."),
        threads_option,
        json_option,
        common,
    ]
    return _apply(options, function)


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
