"""How good a head is: tokens per round on question sets, beside other heads of the same target.

    python -m benchmarks.head --data FOLDER --head before=OLD --head after=recipes/smollm2-135m/eagle3

FOLDER holds question sets as FastChat writes them. Each head is built with the target and decodes the same
questions with the same seeds. Whatever the head, the answers must be the same tokens: that is compared too,
against the first head and tree of each temperature. Nothing is timed, so a few questions run side by side. A
figure that is in the file already is not measured again unless --force is given; heads go by their weights.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.cpu import SETS

TREES = ("chain:4", "default", "dynamic:4,4,16", "dynamic:8,10,60")  # "default": the recipe's own


@click.command(help=__doc__)
@click.option("--target", default="smollm2-135m", show_default=True)
@click.option("--head", "heads", multiple=True, required=True, metavar="NAME=FOLDER")
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--limit", default=20, show_default=True, help="Questions of each set.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--tree", "trees", multiple=True, default=TREES, show_default=True)
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 1.0))
@click.option("--batch", default=4, show_default=True, help="Questions side by side.")
@click.option("--threads", default=0, help="Threads inside an operator; 0: one per core.")
@click.option("--force", is_flag=True, help="Measure again what the file already has.")
@click.option("--out", default="benchmarks/results/head_smollm2.json", type=click.Path(path_type=Path))
def main(*, heads: tuple[str, ...], force: bool, out: Path, **options: Any) -> None:
    asked = {key: options[key] for key in ("target", "limit", "max_new_tokens")}
    known = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    results: dict[str, Any] = known if known.get("asked") == asked else {"asked": asked, "heads": {}}
    for head in heads:
        name, _, folder = head.partition("=")
        measure(name, Path(folder), results, out, force=force, **options)
    click.echo(json.dumps(results))


def measure(
    name: str, folder: Path, results: dict[str, Any], out: Path, *, force: bool, **options: Any
) -> None:
    """Fills results["heads"][name], one tree, temperature and question set after the other."""
    from eagle_export.checkpoints.weights import folder_identity
    from eagle_run.datasets import read_questions
    from eagle_run.decoding.config import SpeculativeConfig
    from eagle_run.decoding.tree_spec import parse_spec
    from eagle_run.engine.loading import load_engine
    from eagle_run.engine.offline import OfflineRequest, run_offline
    from eagle_run.params import SamplingParams

    weights = folder_identity(folder)
    mine = results["heads"].get(name, {})
    if mine.get("weights_sha256") != weights or force:
        mine = {"weights_sha256": weights, "figures": {}}
    results["heads"][name] = mine
    with tempfile.TemporaryDirectory() as work:
        bundle = _build(options["target"], folder, Path(work) / "bundle", options["batch"])
        engine = load_engine(bundle, device="cpu", batch=options["batch"], threads=options["threads"])
        for temperature in options["temperatures"]:
            for tree in options["trees"]:
                shape = engine.default_tree if tree == "default" else parse_spec(tree)
                assert shape is not None  # it was built with a head
                figures = mine["figures"].setdefault(f"{tree}, T={temperature:g}", {})
                for set_name in SETS:
                    if set_name in figures:
                        continue
                    start = time.perf_counter()
                    questions = read_questions(options["data"] / f"{set_name}.jsonl", limit=options["limit"])
                    params = SamplingParams(
                        temperature=temperature, seed=1, max_tokens=options["max_new_tokens"]
                    )
                    prompts = [engine.tokenizer.encode_prompt(q.turns[0]) for q in questions]
                    requests = [OfflineRequest(tuple(prompt), params) for prompt in prompts]
                    done = run_offline(engine, requests, SpeculativeConfig(shape))
                    figures[set_name] = _figures(done) | {
                        "same_answers": _same(results, f"{set_name}, T={temperature:g}", done.token_ids)
                    }
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                    seconds = time.perf_counter() - start
                    rate = figures[set_name]["tokens_per_round"]
                    click.echo(
                        f"{name}, {tree}, T={temperature:g}, {set_name}: {rate:.3f} ({seconds:.0f} s)",
                        err=True,
                    )


def _build(target: str, head: Path, out: Path, batch: int) -> Path:
    from eagle_export.pipeline.build import build
    from eagle_export.pipeline.options import BuildOptions
    from eagle_export.progress import Progress

    return build(
        BuildOptions(target=target, head=str(head), out=out, max_batch=batch), Progress()
    ).bundle.path


def _figures(done: Any) -> dict[str, Any]:
    stats = done.metrics
    return {
        "tokens_per_round": round(stats.tokens_per_round, 4),
        "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth],
        "tokens": stats.tokens,
        "rounds": stats.rounds,
    }


def _same(results: dict[str, Any], key: str, tokens: list[list[int]]) -> float:
    """Share of the answers that equal the first ones to these questions, kept as hashes."""
    import hashlib

    found = [hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:12] for answer in tokens]
    first = results.setdefault("answers", {}).setdefault(key, found)
    return sum(a == b for a, b in zip(first, found, strict=True)) / len(found)


if __name__ == "__main__":
    main()
