"""What each idea of EAGLE-3 brings: short trainings that differ in one thing, on the same data and updates.

    python -m benchmarks.ablation --data selfplay.npz --work FOLDER

Trains SmolLM2 heads one after the other into FOLDER/<name>; one that is there already is
not trained again, an interrupted one goes on. The result says what each was like on held-out conversations.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

# What is passed to `train` beside the common settings; the order is that of the papers' tables.
RUNS = {
    "eagle1": ("--algorithm", "eagle1", "--loss", "regression", "--steps", "1", "--noise", "0.1"),
    "hass": ("--algorithm", "eagle1", "--loss", "hass", "--steps", "3"),
    "free_one": ("--algorithm", "eagle1", "--steps", "1"),
    "free_ttt": ("--algorithm", "eagle1", "--steps", "4"),
    "top_ttt": ("--layers", "27", "--steps", "4"),
    "fused_one": ("--steps", "1"),
    "fused_ttt": ("--steps", "4"),
}
COMMON = (
    *("--draft-vocab", "8192", "--lr", "1e-3", "--warmup", "0.05", "--batch-tokens", "2048"),
    *("--average", "0.99", "--eval-every", "100", "--save-every", "50", "--validation", "64"),
)


@click.command(help=__doc__)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--features-cache", type=click.Path(path_type=Path), help="Default: FOLDER/features.")
@click.option("--updates", default=100, show_default=True)
@click.option("--threads", default=0, help="0: one per core.")
@click.option("--only", multiple=True, type=click.Choice(list(RUNS)))
@click.option("--out", default="benchmarks/results/ablation_smollm2.json", type=click.Path(path_type=Path))
def main(
    *,
    data: Path,
    work: Path,
    features_cache: Path | None,
    updates: int,
    threads: int,
    only: tuple[str, ...],
    out: Path,
) -> None:
    results: dict[str, Any] = {"updates": updates, "runs": {}}
    for name in only or RUNS:
        folder = work / name
        if not _finished(folder, updates):
            command = [
                *(sys.executable, "-m", "eagle_export", "train", "smollm2-135m", *COMMON, *RUNS[name]),
                *("--data", str(data), "--out", str(folder), "--max-updates", str(updates)),
                *("--features-cache", str(features_cache or work / "features"), "--threads", str(threads)),
                *(["--resume"] if folder.exists() else []),
            ]
            subprocess.run(command, check=True)
        results["runs"][name] = summary(json.loads((folder / "training.json").read_text()))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(results))


def _finished(folder: Path, updates: int) -> bool:
    record = folder / "training.json"
    return record.is_file() and json.loads(record.read_text())["updates"] == updates


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of one training."""
    last = record["last"]["validation"]
    return {
        "settings": {
            key: record["settings"][key]
            for key in ("algorithm", "steps", "loss", "features", "noise", "lr", "batch_tokens")
        },
        "data_sha256": record["data"]["sha256"],
        "updates": record["updates"],
        "tokens": record["tokens"],
        "acceptance": [round(value, 4) for value in last["acceptance"]],
        "tokens_per_round": round(last["tokens_per_round"], 4),
        "tokens_per_round_top": round(last["tokens_per_round_top"], 4),
        "rows": last["rows"],
    }


if __name__ == "__main__":
    main()
