"""eagle-run: each command parses its options and makes one call. Heavy libraries load inside commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from eagle_run.cli.options import TREE_NOTE, Options, common_options, note
from eagle_run.cli.runner import run_cli
from eagle_run.errors import EagleError, UsageError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Run `eagle-run COMMAND --help` for the options and examples of a command.",
)
@click.version_option(package_name="eagle-run", message="%(prog)s %(version)s")
def cli() -> None:
    """Decodes with a bundle that `eagle-export build` made: several tokens a step, exactly the target's text.

    A small draft head proposes a tree of continuations, the target checks them in one forward, and what it
    would not have said itself is dropped.

    \b
    Examples:
      eagle-run generate bundles/smollm2-135m-eagle3 --prompt "Why is the sky blue?" --compare
      eagle-run chat bundles/smollm2-135m-eagle3
      eagle-run bench bundles/smollm2-135m-eagle3 --dataset mt_bench.jsonl --limit 20
    """


@cli.command(epilog=TREE_NOTE)
@click.option(
    "--prompt", "texts", multiple=True, metavar="TEXT", help="The prompt; give several for several."
)
@click.option("--prompt-file", metavar="FILE", help="Read one prompt from a file; - is standard input.")
@click.option(
    "--prompts",
    "prompts_file",
    metavar="JSONL",
    help='One prompt a line: {"prompt": ...}, {"messages": [...]} or {"turns": [...]}.',
)
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option("--batch", type=int, default=1, show_default=True, help="Prompts decoded side by side.")
@click.option(
    "--compare",
    is_flag=True,
    help="Decode plainly as well; show the speed-up and any difference (exit 1 unless by a tie).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt instead of the text.")
@common_options(max_tokens=256)
def generate(
    options: Options,
    *,
    texts: tuple[str, ...],
    prompt_file: str | None,
    prompts_file: str | None,
    batch: int,
    compare: bool,
    as_json: bool,
    system: str | None,
    raw: bool,
    stop: tuple[str, ...],
    ignore_eos: bool,
) -> None:
    """Answer one or more prompts with BUNDLE, as text on standard output.

    Without --prompt, --prompt-file or --prompts the prompt is read from standard input.

    \b
    Examples:
      eagle-run generate BUNDLE --prompt "Why is the sky blue?" --compare
      eagle-run generate BUNDLE --prompt-file letter.txt --temperature 0.8 --top-p 0.95 --seed 7
      eagle-run generate BUNDLE --prompts questions.jsonl --batch 4 --json > answers.jsonl
    """
    from eagle_run.cli.generate import Generation, encode_prompts, gather_prompts

    options.check()
    params = options.params(stop=stop, ignore_eos=ignore_eos)
    prompts = gather_prompts(texts, prompt_file, prompts_file)
    llm = options.open(batch, params)

    from eagle_run.engine.offline import OfflineRequest

    encoded = encode_prompts(llm, prompts, system=system, raw=raw)
    generation = Generation(llm, [OfflineRequest(ids, params) for ids in encoded], compare, as_json)
    try:
        generation.run()
    finally:
        if any(metrics.tokens for metrics in generation.metrics):
            note(generation.summary())
    if generation.faults:
        raise EagleError(
            f"{generation.faults} of {len(prompts)} answers differ from plain decoding, and not by a tie",
            hint="please report this, with the bundle, the prompt and the options",
        )


@cli.command(epilog=TREE_NOTE)
@click.option("--system", metavar="TEXT", help="A system message at the start.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text.")
@common_options(max_tokens=512)
def chat(options: Options, system: str | None, stop: tuple[str, ...]) -> None:
    """Talk with BUNDLE in the terminal.

    /reset begins a new conversation, /stats shows the figures, /exit leaves. Ctrl-C stops an answer.
    """
    from eagle_run.cli.chat import Chat

    options.check()
    params = options.params(stop=stop)
    Chat(options.open(params=params), params, system).loop()


@cli.command(epilog=TREE_NOTE)
@click.option("--dataset", required=True, type=click.Path(path_type=Path), help="FastChat-style JSON lines.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N questions.")
@click.option(
    "--turns",
    type=click.Choice(["first", "all"]),
    default="first",
    show_default=True,
    help="With all, follow-up questions build on plain decoding's answers.",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Questions decoded side by side.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Times that each is decoded, both ways; the median counts.",
)
@click.option("--raw", is_flag=True, help="Without the chat template.")
@click.option("--ignore-eos", is_flag=True, help="Always --max-new-tokens tokens.")
@click.option(
    "--json", "out", type=click.Path(path_type=Path), help="Also write it here, with every question."
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what is measured in this file; an interrupted run goes on from it.",
)
@common_options(max_tokens=128)
def bench(
    options: Options,
    *,
    dataset: Path,
    limit: int | None,
    turns: str,
    batch: int,
    out: Path | None,
    repeat: int,
    raw: bool,
    ignore_eos: bool,
    resume: Path | None,
) -> None:
    """Measure BUNDLE against plain decoding on a set of questions, interleaved; the last line is JSON.

    \b
    Example:
      eagle-run bench BUNDLE --dataset mt_bench.jsonl --limit 20 --tree auto --json result.json
    """
    from eagle_run.cli.progress import questions_bar
    from eagle_run.datasets import read_questions

    options.check()
    params = options.params(ignore_eos=ignore_eos)
    questions = read_questions(dataset, limit=limit or 0, turns=turns)
    _check_writable(out, "--json")
    _check_writable(resume, "--resume")
    llm = options.open(batch, params)

    from eagle_run.bench.runner import bench as run_bench

    groups = [questions[first : first + batch] for first in range(0, len(questions), batch)]
    total = sum(max(len(question.turns) for question in group) for group in groups)
    with questions_bar(total) as progress:
        result = run_bench(llm, questions, params, repeat=repeat, raw=raw, resume=resume, progress=progress)
    report = {"dataset": dataset.name, **result.report()}
    click.echo(json.dumps(report, ensure_ascii=False))  # first: a full disk must not lose it
    if out:
        full = {"dataset": dataset.name, **result.report(per_prompt=True)}
        out.write_text(json.dumps(full, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_writable(out: Path | None, option: str) -> None:
    """Before minutes of measuring: can the result be written at all?"""
    if out and (out.is_dir() or not out.parent.is_dir()):
        found = "a folder" if out.is_dir() else "no such folder"
        raise UsageError(f"{option} {out}: {found}", hint="name a file in a folder that exists")


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line and returns its exit code."""
    return run_cli(cli, "eagle-run", arguments)
