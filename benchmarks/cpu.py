"""The figures of the README for a CPU: one run, pairs interleaved, one JSON file.

    python -m benchmarks.cpu --data FOLDER          # FOLDER/{mt_bench,humaneval,gsm8k,alpaca}.jsonl
    python -m benchmarks.cpu --data FOLDER --only sets --limit 4

FOLDER holds question sets as FastChat writes them. Each part is saved as it finishes; parts that are in the
file already are not measured again unless --force is given. Compare figures of one file only.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

QUESTION = "Why is the sky blue?"
ROOT = Path(__file__).parent.parent
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca")
TREES = (
    *("chain:1", "chain:2", "chain:3", "static:0,0,1"),
    *("dynamic:2,2,4", "dynamic:2,3,5", "dynamic:2,3,6", "dynamic:2,4,6", "dynamic:3,2,6", "dynamic:3,3,8"),
    *("dynamic:2,4,12", "dynamic:3,4,12", "dynamic:4,4,16", "dynamic:6,6,32"),
)


PARTS = ("export", "forward", "baselines", "trees", "sets", "transcript")


@click.command(help=__doc__)
@click.option("--bundle", default="bundles/smollm2-135m-eagle3", show_default=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--limit", default=20, show_default=True, help="Questions of each set.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--threads", default=0, help="Threads inside an operator; 0: one per core.")
@click.option("--tree", help="Tree for the sets; default: the best on MT-bench of those tried.")
@click.option("--only", multiple=True, type=click.Choice(PARTS))
@click.option("--force", is_flag=True, help="Measure again what the file already has.")
@click.option("--out", default="benchmarks/results/cpu_smollm2.json", type=click.Path(path_type=Path))
def main(**options: Any) -> None:
    run = Run(**options)
    parts: dict[str, Callable[[], Any]] = {name: getattr(run, name) for name in PARTS}
    for name in options["only"] or PARTS:
        if name in run.results and not options["force"]:
            click.echo(f"{name}: already in {options['out']}", err=True)
            continue
        start = time.perf_counter()
        run.results[name] = parts[name]()
        run.save()
        click.echo(f"{name}: {time.perf_counter() - start:.0f} s", err=True)
    click.echo(json.dumps(run.results))


class Run:
    """The options and what has been measured so far.

    Parts are kept from one call to the next only while the code that is measured stays the same.
    """

    def __init__(self, out: Path, bundle: str, data: Path, **options: Any) -> None:
        self.out = out
        self.bundle = bundle
        self.data = data
        self.options = options
        known = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        self.results: dict[str, Any] = known if known.get("code") == code() else {"code": code()}
        self._engine: Any = None

    @property
    def engine(self) -> Any:
        if self._engine is None:
            from eagle_run.backends.environment import environment
            from eagle_run.engine.loading import load_engine

            self._engine = load_engine(self.bundle, device="cpu", threads=self.options["threads"])
            self.results["environment"] = environment(self.options["threads"])
        return self._engine

    @property
    def threads(self) -> int:
        from eagle_run.backends.environment import cores

        return self.options["threads"] or cores()

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def questions(self, name: str, limit: int) -> list[Any]:
        from eagle_run.datasets import read_questions

        return read_questions(self.data / f"{name}.jsonl", limit=limit)

    def export(self) -> dict[str, Any]:
        """Building the bundle from cached weights, three times: seconds and peak memory of the process."""
        runs = []
        with tempfile.TemporaryDirectory() as work:
            for i in range(3):
                command = ("-m", "eagle_export", "build", "--target", "smollm2-135m", "--json")
                start = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, *command, "--out", f"{work}/{i}"],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                runs.append({"process_seconds": time.perf_counter() - start, **json.loads(done.stdout)})
        for entry in runs:
            entry.pop("bundle")
        return {
            "seconds": median(entry["seconds"] for entry in runs),
            "process_seconds": median(entry["process_seconds"] for entry in runs),
            "peak_memory_bytes": max(entry["peak_memory_bytes"] for entry in runs),
            "runs": runs,
        }

    def transcript(self) -> dict[str, str]:
        """The command of the README as a user runs it, and what it prints."""
        command = f'eagle-run generate {self.bundle} --prompt "{QUESTION}" --max-new-tokens 128 --compare'
        done = subprocess.run(
            [sys.executable, "-m", "eagle_run", *shlex.split(command)[1:]],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return {"command": command, "output": done.stdout.strip()}

    def forward(self) -> dict[str, Any]:
        """Milliseconds of a target and a draft forward by rows and attended width, sizes taken in turns."""
        import torch

        runner = self.engine.runner
        shapes = [(rows, kv) for kv in (128, 256, 512) for rows in (1, 2, 3, 4, 6, 8, 12, 16, 32)]
        calls = {}
        for name, make in (("target", runner.target), ("draft", runner.draft)):
            for rows, kv in shapes:
                call = make(rows, rows, kv)
                call.inputs["tree_mask"].fill_(True)
                call.inputs["logits_index"].copy_(torch.arange(rows))
                calls[name, rows, kv] = call
        times: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
        for _ in range(15):
            for key, call in calls.items():
                start = time.perf_counter()
                call.run()
                times[key].append(1e3 * (time.perf_counter() - start))
        result: dict[str, Any] = {"target": [], "draft": []}
        for (name, rows, kv), values in times.items():
            entry = {
                "rows": rows,
                "kv": kv,
                "ms": round(median(values), 2),
                "least_ms": round(min(values), 2),
            }
            result[name].append(entry)
        return result

    def baselines(self) -> dict[str, Any]:
        """Plain decoding, float32: ours, Transformers, onnxruntime-genai; by prompt, the order rotating."""
        from benchmarks import baselines
        from eagle_export.reference.recipe import resolve_target

        folder = resolve_target("smollm2-135m").folder
        prompts = [self.engine.tokenizer.encode_prompt(q.turns[0]) for q in self.questions("mt_bench", 8)]
        with tempfile.TemporaryDirectory() as work:
            decoders = {
                "eagle_run": baselines.ours(self.engine),
                "transformers": baselines.transformers(folder, self.threads),
                "onnxruntime_genai": baselines.onnxruntime_genai(folder, Path(work), None),
                "onnxruntime_genai_threads": baselines.onnxruntime_genai(folder, Path(work), self.threads),
            }
            names = list(decoders)
            speeds: dict[str, list[float]] = {name: [] for name in names}
            same: dict[str, list[bool]] = {name: [] for name in names}
            for decode in decoders.values():
                decode(prompts[0], 16)
            for turn, prompt in enumerate(prompts):
                tokens = {}
                for name in names[turn % 4 :] + names[: turn % 4]:
                    tokens[name], seconds = decoders[name](prompt, self.options["max_new_tokens"])
                    speeds[name].append(len(tokens[name]) / seconds)
                for name in names:
                    same[name].append(tokens[name] == tokens["eagle_run"])
        return {
            "tokens_per_second": {name: round(median(speeds[name]), 2) for name in names},
            "ratio": {
                name: round(median(a / b for a, b in zip(speeds["eagle_run"], speeds[name], strict=True)), 3)
                for name in names[1:]
            },
            "same_tokens": {name: sum(same[name]) / len(prompts) for name in names[1:]},
            "prompts": len(prompts),
            "per_prompt": {name: [round(v, 2) for v in speeds[name]] for name in names},
        }

    def trees(self) -> list[dict[str, Any]]:
        """Each tree against plain decoding on the first MT-bench questions at T=0, best first."""
        from eagle_run.bench.runner import bench
        from eagle_run.decoding.tree_spec import parse_spec

        rows = []
        for spec in TREES:
            result = bench(self.engine, self.questions("mt_bench", 5), parse_spec(spec), max_new_tokens=96)
            report = result.report()
            figures = report["speculative"]
            rows.append(
                {
                    "tree": spec,
                    "speedup": report["speedup"],
                    "speedup_median": report["speedup_median"],
                    **{key: figures[key] for key in ("tokens_per_round", "draft_ms", "verify_ms", "glue_ms")},
                    "plain_ms": report["plain"]["verify_ms"],
                    "identical_outputs": report["identical_outputs"],
                }
            )
            click.echo(f"  {spec}: {report['speedup']:.3f}", err=True)
        return sorted(rows, key=lambda row: -row["speedup"])

    def sets(self) -> dict[str, Any]:
        """The question sets at T=0 and T=1 with one tree."""
        from eagle_run.bench.runner import bench
        from eagle_run.decoding.sampling import SamplingParams
        from eagle_run.decoding.tree_spec import parse_spec

        spec = self.options["tree"] or self.results["trees"][0]["tree"]
        rows: dict[str, Any] = {"tree": spec}
        for name in SETS:
            for temperature in (0.0, 1.0):
                result = bench(
                    self.engine,
                    self.questions(name, self.options["limit"]),
                    parse_spec(spec),
                    SamplingParams(temperature=temperature, seed=1),
                    max_new_tokens=self.options["max_new_tokens"],
                )
                report = result.report(per_prompt=True)
                rows[f"{name}_T{temperature:g}"] = report
                click.echo(f"  {name} T={temperature:g}: {report['speedup']:.3f}", err=True)
        return rows


def code() -> str:
    """SHA-256 over the sources of both packages: what the figures are figures of."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("eagle_export/**/*.py"), *ROOT.glob("runtime/**/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
