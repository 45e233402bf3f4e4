"""The options that several commands of eagle-export share. Imports nothing heavy: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from eagle_export.options import PRECISIONS, TREE_KINDS

F = TypeVar("F", bound=Callable[..., Any])


def common(function: F) -> F:
    """--debug, which every command takes and `run_cli` acts upon."""
    option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
    return option(function)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on standard output."
)
threads_option = click.option(
    "--threads", type=click.IntRange(min=0), default=0, help="CPU threads; 0 takes one per core."
)


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
        click.option("--out", type=click.Path(path_type=Path), help="Where to write."),
        click.option(
            "--precision",
            type=click.Choice(PRECISIONS),
            default="fp32",
            show_default=True,
            help="Of weights and caches. fp32 for CPUs.",
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
    for option in reversed(options):
        function = option(function)
    return function
