"""`eagle-export data`: training conversations from a target itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from eagle_export.cli.options import (
    check_lines,
    check_target,
    common,
    json_option,
    threads_option,
    use_threads,
)

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)


def _options(function: F) -> F:
    """Everything that the conversations depend on, named as in DataSettings."""
    options = [
        click.option(
            "--prompts",
            multiple=True,
            type=_FILE,
            help="Conversations to answer anew, one JSON object a line: messages as of ShareGPT, OpenAI or "
            'SpecForge, {"turns": [...]} or {"prompt": ...}. May be repeated.',
        ),
        click.option(
            "--self-play",
            type=click.IntRange(min=1),
            metavar="N",
            help="Let the target write N prompts itself, after the beginnings in --openings.",
        ),
        click.option(
            "--turns",
            type=click.IntRange(1, 8),
            default=1,
            show_default=True,
            help="Most turns in self-play.",
        ),
        click.option("--openings", type=_FILE, help="Beginnings of prompts for self-play. Default: our own."),
        click.option(
            "--exclude",
            multiple=True,
            type=_FILE,
            help="Prompts that must not be trained on, such as those of a benchmark. May be repeated.",
        ),
        click.option(
            "--exclude-words",
            type=click.IntRange(min=2),
            default=8,
            show_default=True,
            help="So many words in a row of such a prompt exclude one.",
        ),
        click.option(
            "--temperature",
            default="0:0.5,0.7:0.25,1.0:0.25",
            show_default=True,
            metavar="T:SHARE,...",
            help="Temperatures of the answers with their shares.",
        ),
        click.option(
            "--prompt-temperature",
            type=click.FloatRange(min=0, max=100),
            default=1.0,
            show_default=True,
            help="Temperature of prompts in self-play.",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(min=0),
            default=40,
            show_default=True,
            help="Sample from the K likeliest tokens; 0 from all.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        click.option(
            "--max-prompt-tokens", type=click.IntRange(min=8), default=512, show_default=True, metavar="N"
        ),
        click.option(
            "--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, metavar="N"
        ),
        click.option(
            "--max-seq-len",
            type=click.IntRange(min=16),
            default=2048,
            show_default=True,
            metavar="N",
            help="Longest conversation in tokens. Memory grows with it, times --batch.",
        ),
        click.option(
            "--near",
            type=click.FloatRange(min=0, max=1, min_open=True),
            default=0.7,
            show_default=True,
            help="Overlap in word triples from which a prompt is dropped as seen; 1: only equal ones.",
        ),
        click.option(
            "--loops",
            type=click.Choice(("drop", "cut", "keep")),
            default="drop",
            show_default=True,
            help="Answers that go round in circles: drop them, or cut them after two rounds.",
        ),
        click.option(
            "--shard-size",
            type=click.IntRange(min=1),
            default=1024,
            show_default=True,
            help="Prompts in a shard, many times --batch: the last answers of one run in half-empty batches. "
            "An interruption costs one shard at most.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command()
@click.argument("target")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The folder to write or go on with."
)
@_options
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="Where to generate; auto takes a GPU if there is one.",
)
@click.option(
    "--precision",
    type=click.Choice(("fp32", "fp16", "bf16")),
    help="Of source weights. Default: bf16 where it is fast, else fp32.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Conversations side by side.",
)
@threads_option
@json_option
@common
def data(target: str, out: Path, as_json: bool, threads: int, **options: Any) -> None:
    """Make training conversations with TARGET: its own answers to your prompts, or to prompts of its own.

    TARGET is a recipe, a model folder, a hub id, or a bundle that `build` made. Run the same command again to
    go on after an interruption, or with a larger --self-play to have more.

    \b
    Examples:
      eagle-export data smollm2-135m --self-play 20000 --out data/smollm2
      eagle-export data llama3.1-8b --prompts sharegpt.jsonl --device cuda --batch 256 --out data/llama
      eagle-export data smollm2-135m --prompts mine.jsonl --self-play 900 --exclude gsm8k.jsonl --out data/mix
    """
    from eagle_export.data.settings import DataSettings, parse_temperatures

    device, precision, batch = (options.pop(name) for name in ("device", "precision", "batch"))
    options["temperatures"] = parse_temperatures(options.pop("temperature"))
    options["self_play"] = options["self_play"] or 0
    settings = DataSettings(**options)
    settings.check()
    check_target(target, bundles=True)
    check_lines([*settings.prompts, *settings.exclude])

    from eagle_export.data.generator import Place  # only now: these load torch
    from eagle_export.data.run import make_data
    from eagle_export.progress import Report

    place = Place(device, precision or "", batch, threads)
    use_threads(threads)
    try:
        made = make_data(target, settings, place, out, Report())
    except KeyboardInterrupt:
        said = f"interrupted; finished shards are in {out}, run the same command to go on"
        raise click.Abort(said) from None
    if as_json:
        shown = {name: made[name] for name in ("target", "counts", "settings", "made_with")}
        click.echo(json.dumps({"folder": str(out), **shown}, indent=2))
        return
    counts = made["counts"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts["dropped"].items()))
    click.echo(
        f"{out}: {counts['conversations']} conversations, {counts['answer_tokens']:,} tokens of answers in "
        f"{counts['shards']} shard{'s' if counts['shards'] != 1 else ''}; dropped: {reasons or 'nothing'}"
    )
