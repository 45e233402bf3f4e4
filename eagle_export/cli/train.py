"""`eagle-export train`: a head for a target, from conversations that the target wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from eagle_export.cli.options import (
    apply_options,
    check_target,
    common,
    json_option,
    layer_numbers,
    option_of,
    threads_option,
    use_threads,
)
from eagle_export.train.settings import (
    ALGORITHMS,
    FEATURES,
    LOSSES,
    PRECISIONS,
    TrainSettings,
    check_sources,
)


def _setting(name: str, kind: Any, help_: str) -> Any:
    return option_of(TrainSettings, name, help_, type=kind)


_COUNT, _SHARE = click.IntRange(min=1), click.FloatRange(0, 1)
_SETTINGS = [
    _setting("steps", _COUNT, "Unrolled steps of training-time test; 1 is without it."),
    _setting("draft_vocab", _COUNT, "Tokens that the draft can say: the most frequent of the answers."),
    _setting("epochs", _COUNT, "How often each conversation is seen."),
    _setting("max_updates", _COUNT, "Updates in all, instead of --epochs."),
    _setting("lr", click.FloatRange(min=0, min_open=True), "Highest learning rate."),
    _setting("warmup", _SHARE, "Share of the updates over which it rises."),
    _setting("batch_tokens", _COUNT, "Tokens in one forward, padding included."),
    _setting("accumulate", _COUNT, "Forwards for one update."),
    _setting("max_length", click.IntRange(min=8), "Tokens of a conversation; the rest is cut."),
    _setting("decay", click.FloatRange(min=0), "Step i counts this to the power of i."),
    _setting("clip", click.FloatRange(min=0, min_open=True), "Largest norm of the gradient."),
    _setting("weight_decay", click.FloatRange(min=0), "Of matrices, as in AdamW."),
    _setting("kv_heads", _COUNT, "Key and value heads. Default: the target's."),
    _setting("average", click.FloatRange(0, 1, max_open=True), "Evaluate and ship a running average."),
    _setting("freeze_lm_head", None, "Leave lm_head as it starts."),
    _setting("algorithm", click.Choice(ALGORITHMS), "Kind of head."),
    _setting("features", click.Choice(FEATURES), "Ablation: read three layers, or only the top one."),
    _setting("loss", click.Choice(LOSSES), "Ablation: what is learnt, see docs/training.md."),
    _setting("noise", click.FloatRange(min=0), "Ablation: uniform noise on features, as in EAGLE-1."),
    _setting("ce_weight", click.FloatRange(min=0), "Cross-entropy's part where features are regressed."),
    _setting("top_tokens", _COUNT, "Tokens that the hass loss looks at."),
    _setting("validation", click.IntRange(min=0), "Conversations held out; at most a tenth."),
    _setting("eval_every", _COUNT, "Updates between looks at them."),
    _setting("save_every", click.IntRange(min=0), "Updates between checkpoints; 0 keeps none."),
    _setting("keep", _COUNT, "Checkpoints to keep."),
    _setting("precision", click.Choice(PRECISIONS), "Of products. auto: the faster."),
    _setting("seed", click.IntRange(0, 2**32), "Of everything random."),
]


def _settings(function: Any) -> Any:
    return apply_options(_SETTINGS, function)


@click.command()
@click.argument("target")
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="What `eagle-export data` wrote, or an .npz of that form. May be repeated.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the new head.")
@click.option("--init", default="target", show_default=True, help="First weights: target, random, a head.")
@click.option("--layers", metavar="I,J,K", help="Target layers to read, as indices into hidden_states.")
@click.option("--features-cache", type=click.Path(path_type=Path), help="Where features go. Default: --out.")
@click.option("--on-the-fly", is_flag=True, help="Compute features again each time: slower, and no disk.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out.")
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="auto takes a GPU if there is one.",
)
@_settings
@threads_option
@json_option
@common
def train(threads: int, as_json: bool, layers: str | None, **options: Any) -> None:
    """Train an EAGLE head for TARGET, and put it into --out as `--head` takes it.

    --out gets the head that did best on held-out conversations, training.json with all figures, curve.png,
    and checkpoints. Ctrl-C saves one. Several GPUs: torchrun --nproc-per-node N -m eagle_export train ...

    \b
    Examples:
      eagle-export train smollm2-135m --data data/ --out heads/mine
      eagle-export train smollm2-135m --data data/ --out heads/mine --resume
      eagle-export build --target smollm2-135m --head heads/mine
    """
    names = ("init", "features_cache", "on_the_fly", "resume", "device", "out")
    taken = {name: options.pop(name) for name in names}
    data = tuple(options.pop("data"))
    target = options.pop("target")
    settings = TrainSettings(layers=layer_numbers(layers, "layers"), **options)
    check_target(target)
    check_sources(data)

    from eagle_export.progress import Progress
    from eagle_export.train.prepare import TrainRequest  # only now: these load torch
    from eagle_export.train.run import train as run_train

    use_threads(threads)
    try:
        done = run_train(TrainRequest(target, data, settings=settings, **taken), Progress())
    except KeyboardInterrupt:
        raise click.Abort("interrupted; finished features and checkpoints are kept") from None
    if not done.first:
        return
    result = done.as_dict()
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    best = result["best"]
    figure = f", {best['validation']['tokens_per_round']:.2f} tokens per round held out" if best else ""
    click.echo(f"{taken['out']}: {result['updates']} updates{figure}")
