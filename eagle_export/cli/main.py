"""eagle-export: each command parses its options and makes one call. Heavy libraries load inside commands."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eagle_export.cli.data import data
from eagle_export.cli.options import (
    common,
    engine_options,
    fp8_options,
    fresh_option,
    json_option,
    layer_numbers,
    print_rich,
    source_options,
    take_engine,
    take_fp8,
    threads_option,
    use_threads,
)
from eagle_export.cli.sensitivity import sensitivity
from eagle_export.cli.train import train
from eagle_run.cli.runner import run_cli
from eagle_run.errors import EagleError, UsageError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Run `eagle-export COMMAND --help` for the options and examples of a command.",
)
@click.version_option(package_name="eagle-export", message="%(prog)s %(version)s")
def cli() -> None:
    """Turns a language model (the target) and its EAGLE head (the draft) into plain ONNX graphs.

    The result is a bundle: one folder with the graphs, the tokenizer and a manifest. `eagle-run` decodes with
    it several tokens at a time, and gives exactly the text that the target alone would give.

    \b
    A first try, on any machine:
      eagle-export build --target smollm2-135m
      eagle-run generate bundles/smollm2-135m-eagle3 --prompt "Why is the sky blue?"
    """


@cli.command()
@source_options
@engine_options("onnxruntime")
@fp8_options
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Below fp32: compare the target with its fp32 self on some prompts, and note it in the manifest.",
)
@click.option("--plan", is_flag=True, help="Only estimate time, disk and memory.")
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@fresh_option
def build(threads: int, as_json: bool, plan: bool, **options: Any) -> None:
    """Build a bundle that eagle-run can decode with.

    Without --out it goes to bundles/TARGET-HEAD. Sizes and tree that are not given come from the recipe. Run
    the same command again to go on after an interruption.

    \b
    Examples:
      eagle-export build --target smollm2-135m
      eagle-export build --target llama3.1-8b --head eagle3 --precision fp8 --backend tensorrt-rtx
      eagle-export build --target ./my-model --head ./my-head --max-seq-len 4096 --out bundles/mine
    """
    from eagle_export.inspection.describe import describe, size
    from eagle_export.pipeline.build import build as run_build
    from eagle_export.progress import Progress

    asked = _options(options)
    _judge(replace(asked, force=asked.force or plan))
    use_threads(threads)
    if plan:
        _show_plan(asked, as_json)
        return
    built = run_build(asked, Progress())
    total = describe(built.bundle)["total_bytes"]
    if as_json:
        _print_json(
            {
                "bundle": str(built.bundle.path),
                "bytes": total,
                "seconds": round(built.total_seconds, 2),
                "peak_memory_bytes": built.peak_memory_bytes,
                "steps": {name: round(value, 2) for name, value in built.seconds.items()},
            }
        )
        return
    peak = size(built.peak_memory_bytes)
    click.echo(
        f"{built.bundle.path}: {size(total)}, built in {built.total_seconds:.0f} s, peak memory {peak}"
    )


@cli.command(name="compile")
@click.argument("bundle", type=click.Path(path_type=Path))
@engine_options(None)
@click.option("--out", type=click.Path(path_type=Path), help="Write a new bundle. Default: add to BUNDLE.")
@fresh_option
@json_option
@common
def compile_(bundle: Path, out: Path | None, fresh: bool, as_json: bool, **options: Any) -> None:
    """Compile the ONNX graphs of a BUNDLE to engines, beside what it has.

    TensorRT compiles for the GPU of the machine it runs on: copy the bundle there and compile. TensorRT-RTX
    compiles for any of its GPUs on any machine.

    \b
    Examples:
      eagle-export compile bundles/llama3.1-8b-eagle3 --backend tensorrt
      eagle-export compile bundles/llama3.1-8b-eagle3 --backend tensorrt-rtx --target-arch sm89,sm120
    """
    from eagle_export.inspection.describe import describe, render_engines
    from eagle_export.pipeline.compile import compile_bundle
    from eagle_export.progress import Progress

    done = describe(compile_bundle(bundle, take_engine(options), Progress(), out=out, fresh=fresh))
    if as_json:
        _print_json({"bundle": done["path"], "engines": [a for a in done["artifacts"] if a["engine"]]})
    else:
        print_rich(render_engines(done))


@cli.command()
@source_options
@fp8_options
@fresh_option
def export(threads: int, as_json: bool, **options: Any) -> None:
    """Write the ONNX graphs alone into a new folder, for use outside of eagle-run.

    \b
    Example:
      eagle-export export --target smollm2-135m --out graphs/
    """
    from eagle_export.pipeline.build import export_only
    from eagle_export.progress import Progress

    if options["out"] is None:
        raise UsageError("no place to write the graphs to", hint="name a new folder with --out")
    asked = _options(options)
    _judge(asked)
    use_threads(threads)
    folder = export_only(asked, Progress())
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        _print_json({"folder": str(folder), "files": files})
        return
    for name in files:
        click.echo(folder / name)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
@common
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is in a BUNDLE: target, head, tree, graphs with their tensors, and how it was built."""
    from eagle_export.inspection.describe import describe, render
    from eagle_run.bundle.loading import load_bundle

    data = describe(load_bundle(bundle))
    _print_json(data) if as_json else print_rich(render(data))


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='Prompts to decode: one JSON object a line, {"turns": ["..."]}. Default: a few of our own.',
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first prompts.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=48, show_default=True, help="Answer length."
)
@click.option("--target", help="Where the target's weights are, if not where they last were on this machine.")
@click.option("--head", help="Where the head's weights are, likewise.")
@threads_option
@json_option
@common
def verify(bundle: Path, threads: int, as_json: bool, **options: Any) -> None:
    """Prove a BUNDLE: graphs against the source weights, tokens against plain decoding, and acceptance.

    Exits with 1 when something is off. Needs the weights that the bundle was built from.

    \b
    Examples:
      eagle-export verify bundles/smollm2-135m-eagle3
      eagle-export verify bundles/smollm2-135m-eagle3 --prompts my.jsonl --limit 8 --json
    """
    from eagle_export.progress import Progress
    from eagle_run.bundle.loading import read_manifest
    from eagle_run.datasets import read_questions

    read_manifest(bundle)  # what is no bundle is refused before torch is loaded: that takes seconds
    if options["prompts"] is not None:
        read_questions(options["prompts"])
    from eagle_export.verify.checks import READING, advice
    from eagle_export.verify.verification import render, verify_bundle

    use_threads(threads)
    result = verify_bundle(bundle, Progress(), threads=threads, **options)
    _print_json(result.as_dict()) if as_json else print_rich(render(result))
    if result.passed:
        return
    message = f"{bundle}: {result.failures} of {len(result.checks)} checks failed"
    failed = {check.name for check in result.checks if check.status == "fail"}
    build_options = ("head_layer_ids", "head_set") if failed == {READING} else ()
    error = EagleError(message, hint=advice(result.checks), parameters=build_options)
    if not as_json:
        raise error
    click.echo(f"error: {error}", err=True)  # stdout has its one document
    click.get_current_context().exit(error.exit_code)


@cli.command()
@json_option
@common
def recipes(as_json: bool) -> None:
    """List the targets that need no more than a name."""
    from rich.table import Table

    from eagle_export.reference.recipe import list_recipes

    known = list_recipes()
    if as_json:
        _print_json([recipe.model_dump(mode="json") for recipe in known])
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("target", "heads", "context", "weights", "description"):
        table.add_column(column, overflow="fold", no_wrap=column == "target")
    for recipe in known:
        heads = ", ".join(recipe.heads) or "none"
        context = str(recipe.limits.max_seq_len)
        table.add_row(recipe.name, heads, context, str(recipe.target), recipe.description)
    print_rich(table)


@cli.command()
@json_option
@common
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and how to get what is missing."""
    from eagle_export.inspection.doctor import diagnose, render, to_json

    checks = diagnose()
    _print_json(to_json(checks)) if as_json else print_rich(render(checks))


def _show_plan(options: Any, as_json: bool) -> None:
    """What a build would take; nothing is built."""
    from eagle_export.pipeline.build import plan_only

    estimate = plan_only(options)
    _print_json(estimate.as_dict()) if as_json else print_rich(estimate.render())


cli.add_command(data)
cli.add_command(sensitivity)
cli.add_command(train)


def _options(values: dict[str, Any]) -> Any:
    from eagle_export.pipeline.options import BuildOptions, EngineOptions

    ids = layer_numbers(values.pop("head_layer_ids"), "head_layer_ids")
    fp8 = take_fp8(values)
    engine = take_engine(values) if "backend" in values else EngineOptions()
    values["precision"] = values["precision"] or ("fp16" if engine.compiles else "fp32")
    if any(values.get(name) is not None for name in ("depth", "top_k", "nodes")):
        click.echo(
            "note: sizes of a tree as options are the old way; --tree dynamic:D,K,N says it all", err=True
        )
    return BuildOptions(head_layer_ids=ids, engine=engine, fp8=fp8, **values)


def _judge(options: Any) -> None:
    """Refuses what its words alone tell to be wrong, before torch is loaded: that takes seconds."""
    from eagle_export.pipeline.plan import check_names

    options.check()
    check_names(options)


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    return run_cli(cli, "eagle-export", arguments, interrupted="interrupted", json_errors=True)


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """The console script. SIGTERM ends it as Ctrl-C does: what is half-written goes away."""
    signal.signal(signal.SIGTERM, _terminate)
    if hasattr(signal, "SIGHUP"):  # a closed terminal
        signal.signal(signal.SIGHUP, _terminate)
    sys.exit(run(sys.argv[1:]))
