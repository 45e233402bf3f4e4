"""`eagle-export data`: training conversations from a target itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from eagle_export.cli.options import (
    apply_options,
    check_lines,
    check_target,
    common,
    json_option,
    option_of,
    threads_option,
    use_threads,
)
from eagle_export.data.settings import LOOPS, DataSettings, parse_temperatures

_FILE, _COUNT = click.Path(path_type=Path, dir_okay=False), click.IntRange(min=1)


def _setting(name: str, kind: Any, help_: str | None, *spellings: str, **attributes: Any) -> Any:
    return option_of(DataSettings, name, help_, *spellings, type=kind, **attributes)


_TEMPERATURES = ",".join(f"{value:g}:{share:g}" for value, share in DataSettings().temperatures)
_SETTINGS = [
    _setting(
        "prompts",
        _FILE,
        "Conversations to answer anew, one JSON object a line: messages as of ShareGPT, OpenAI or "
        'SpecForge, {"turns": [...]} or {"prompt": ...}. May be repeated.',
    ),
    _setting(
        "self_play",
        _COUNT,
        "Let the target write N prompts itself, after the beginnings in --openings.",
        default=None,
        metavar="N",
    ),
    _setting("turns", click.IntRange(1, 8), "Most turns in self-play."),
    _setting("openings", _FILE, "Beginnings of prompts for self-play. Default: our own."),
    _setting(
        "exclude",
        _FILE,
        "Prompts that must not be trained on, such as those of a benchmark. May be repeated.",
    ),
    _setting("exclude_words", click.IntRange(min=2), "So many words in a row of such a prompt exclude one."),
    _setting(
        "temperatures",
        str,
        "Temperatures of the answers with their shares.",
        "--temperature",
        default=_TEMPERATURES,
        metavar="T:SHARE,...",
    ),
    _setting("prompt_temperature", click.FloatRange(min=0, max=100), "Temperature of prompts in self-play."),
    _setting("top_k", click.IntRange(min=0), "Sample from the K likeliest tokens; 0 from all."),
    _setting("seed", click.IntRange(min=0), None),
    _setting("max_prompt_tokens", click.IntRange(min=8), None, metavar="N"),
    _setting("max_new_tokens", _COUNT, None, metavar="N"),
    _setting(
        "max_seq_len",
        click.IntRange(min=16),
        "Longest conversation in tokens. Memory grows with it, times --batch.",
        metavar="N",
    ),
    _setting(
        "near",
        click.FloatRange(min=0, max=1, min_open=True),
        "Overlap in word triples from which a prompt is dropped as seen; 1: only equal ones.",
    ),
    _setting(
        "loops",
        click.Choice(LOOPS),
        "Answers that go round in circles: drop them, or cut them after two rounds.",
    ),
    _setting(
        "shard_size",
        _COUNT,
        "Prompts in a shard, many times --batch: the last answers of one run in half-empty batches. "
        "An interruption costs one shard at most.",
    ),
]


def _options(function: Any) -> Any:
    """Everything that the conversations depend on, named as in DataSettings."""
    return apply_options(_SETTINGS, function)


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
    device, precision, batch = (options.pop(name) for name in ("device", "precision", "batch"))
    options["temperatures"] = parse_temperatures(options["temperatures"])
    options["self_play"] = options["self_play"] or 0
    settings = DataSettings(**options)
    settings.check()
    check_target(target, bundles=True)
    check_lines([*settings.prompts, *settings.exclude])

    from eagle_export.data.generator import GeneratorOptions  # only now: these load torch
    from eagle_export.data.run import make_data
    from eagle_export.progress import Progress

    generator_options = GeneratorOptions(device, precision or "", batch, threads)
    use_threads(threads)
    try:
        made = make_data(target, settings, generator_options, out, Progress())
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
