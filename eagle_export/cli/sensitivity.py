"""`eagle-export sensitivity`: which layers of a target FP8 spoils, and how to keep those in 16 bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from eagle_export.cli.options import (
    check_lines,
    check_target,
    common,
    json_option,
    print_rich,
    threads_option,
    use_threads,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eagle_export.quantize.fp8.sensitivity import Cost

_SHOWN = 12


@click.command()
@click.option("--target", required=True, help="The model, as for build.")
@click.option(
    "--calibration",
    "prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help='Prompts to use, one JSON object a line, {"turns": ["..."]}. Default: some of our own.',
)
@click.option(
    "--scales", type=click.Path(path_type=Path, dir_okay=False), help="Scales of an earlier build in fp8."
)
@threads_option
@json_option
@common
def sensitivity(target: str, prompts: Path | None, scales: Path | None, threads: int, as_json: bool) -> None:
    """Quantise each product of a target to FP8 alone, and rank what that does to its distribution.

    KL is the mean divergence of the next token's distribution from the unquantised one, in nats; kinds are
    summed over layers. What is dear and small is worth keeping in 16 bit.

    \b
    Examples:
      eagle-export sensitivity --target smollm2-135m
      eagle-export build --target smollm2-135m --precision fp8 --keep-16bit '*.down_proj'
    """
    from eagle_export.checkpoints.fp8_scales import Scales

    check_target(target)
    check_lines([] if prompts is None else [prompts])
    if scales is not None:
        Scales.load(scales)

    from eagle_export.pipeline.quantization import find_costs  # only now: these load torch
    from eagle_export.progress import Progress
    from eagle_export.quantize.fp8.sensitivity import by_kind

    use_threads(threads)
    costs = find_costs(target, prompts, scales, Progress())
    kinds = by_kind(costs)
    if as_json:
        rows = {
            name: [_row(cost) for cost in found] for name, found in (("kinds", kinds), ("products", costs))
        }
        click.echo(json.dumps(rows, indent=2))
        return
    print_rich(_table("by kind, summed over layers", kinds))
    print_rich(_table(f"the {min(_SHOWN, len(costs))} dearest products", costs[:_SHOWN]))


def _row(cost: Cost) -> dict[str, object]:
    return {**asdict(cost), "keep_16bit": cost.pattern}


def _table(title: str, costs: Sequence[Cost]) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("--keep-16bit", "KL", "best token changes", "share of weights"):
        table.add_column(column, justify="left" if column.startswith("--") else "right", no_wrap=True)
    for cost in costs:
        table.add_row(f"'{cost.pattern}'", f"{cost.kl:.5f}", f"{cost.changed:.2%}", f"{cost.share:.2%}")
    return table
