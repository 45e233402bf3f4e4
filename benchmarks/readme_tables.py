"""Writes the tables of README.md, docs/ and a model card from benchmarks/results: no figure is typed by hand.

python -m benchmarks.readme_tables          # rewrites what stands between the markers
python -m benchmarks.readme_tables --check  # exits 1 if a page is not what the results say
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.head_tables import ablation_table, head_table
from benchmarks.markdown import SETS, markdown
from benchmarks.scale_tables import scale_table

ROOT = Path(__file__).parent.parent
Tables = dict[str, Callable[[dict[str, Any]], str]]
MODELS = {
    "smollm2": "SmolLM2-135M",
    "0.3b": "random Llama of 0.3B",
    "1b": "random Llama of 1.2B",
    "tiny": "random Llama of 1M",
}


@click.command(help=__doc__)
@click.option("--check", is_flag=True)
def main(check: bool) -> None:
    stale = []
    for page, files in PAGES.items():
        where = ROOT / page
        before = after = where.read_text()
        for file, tables in files.items():
            measured = ROOT / f"benchmarks/results/{file}.json"
            if measured.is_file():
                results = json.loads(measured.read_text())
                for name, table in tables.items():
                    after = replace(after, name, table(results))
        if after != before:
            stale.append(page)
            if not check:
                where.write_text(after)
    if check and stale:
        raise click.ClickException(
            f"{', '.join(stale)}: not what benchmarks/results says; run this without --check"
        )


def replace(text: str, name: str, table: str) -> str:
    """Puts `table` between `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise click.ClickException(f"there is no place marked {name}")
    return pattern.sub(lambda found: found[1] + table + found[2], text)


def sets(results: dict[str, Any]) -> str:
    rows = []
    for key, label in SETS.items():
        for temperature in ("0", "1"):
            report = results["sets"][f"{key}_T{temperature}"]
            figures = report["speculative"]
            rows.append(
                [
                    f"{label}, T={temperature}",
                    f"{figures['tokens_per_round']:.2f}",
                    " ".join(f"{share:.2f}" for share in figures["acceptance_by_depth"]),
                    f"{report['plain']['tokens_per_second']:.1f}",
                    f"{figures['tokens_per_second']:.1f}",
                    f"{report['speedup_median']:.2f}×",
                    f"{figures['draft_ms']:.1f} / {figures['verify_ms']:.1f} / {figures['glue_ms']:.1f}",
                    f"{100 * report['identical_outputs']:.0f}%",
                ]
            )
    head = [
        *("questions", "tokens per round", "acceptance by depth", "plain tok/s", "speculative tok/s"),
        *("speed-up (median)", "draft / verify / glue ms", "identical outputs"),
    ]
    return markdown(head, rows) + f"\nTree: `{results['sets']['tree']}`. {_machine(results)}\n"


def baselines(results: dict[str, Any]) -> str:
    measured = results["baselines"]
    labels = {
        "eagle_run": "eagle-run, `--tree plain`",
        "transformers": "Transformers, `model.generate`",
        "onnxruntime_genai": "onnxruntime-genai, as its builder sets it up",
        "onnxruntime_genai_threads": "onnxruntime-genai, told the number of threads",
    }
    rows = [
        [label, f"{measured['tokens_per_second'][key]:.1f}", ratio(measured, key)]
        for key, label in labels.items()
    ]
    return markdown(["plain decoding, float32", "tokens/s (median)", "ours against it"], rows)


def gains(results: dict[str, Any]) -> str:
    """What the draft brings beside plain decoding: from the least to the most of the question sets."""
    ranges = []
    for temperature in ("0", "1"):
        medians = [results["sets"][f"{key}_T{temperature}"]["speedup_median"] for key in SETS]
        ranges.append(f"{min(medians):.2f}× to {max(medians):.2f}× at temperature {temperature}")
    return (
        f"With the demo's draft, eagle-run decodes at {ranges[0]} and {ranges[1]} of its own plain speed "
        f"(medians of {len(SETS)} question sets). {_machine(results)}\n"
    )


def transcript(results: dict[str, Any]) -> str:
    """What `make demo` printed, as benchmarks/cpu.py kept it."""
    said = results["transcript"]
    return f"```console\n$ {said['command']}\n{said['output']}\n```\n"


def ratio(measured: dict[str, Any], key: str) -> str:
    return f"{measured['ratio'][key]:.2f}×" if key in measured["ratio"] else "–"


def trees(results: dict[str, Any]) -> str:
    rows = [
        [
            f"`{row['tree']}`",
            f"{row['tokens_per_round']:.2f}",
            f"{row['draft_ms']:.1f} / {row['verify_ms']:.1f} / {row['glue_ms']:.1f}",
            f"{row['speedup_median']:.2f}×",
        ]
        for row in results["trees"]
    ]
    return markdown(["tree", "tokens per round", "draft / verify / glue ms", "speed-up (median)"], rows)


def export(results: dict[str, Any]) -> str:
    measured = results["export"]
    return (
        f"Building the bundle from cached weights takes {measured['seconds']:.0f} s (median of "
        f"{len(measured['runs'])}; {measured['process_seconds']:.0f} s as a whole process) and "
        f"{measured['peak_memory_bytes'] / 1e9:.1f} GB of memory at its peak.\n"
    )


def precisions(results: dict[str, Any]) -> str:
    """Of benchmarks/precision.py: a row for each variant."""
    rows = []
    for name, found in results["variants"].items():
        ratio = found["tokens_per_round"] / found["reference_tokens_per_round"]
        rows.append(
            [
                name,
                f"{found['bytes'] / 1e6:.0f} MB",
                f"{100 * found['top1_agreement']:.1f}%",
                f"{found['kl']:.1e}",
                f"{found['perplexity']:.2f} ({found['reference_perplexity']:.2f})",
                f"{found['tokens_per_round']:.2f} ({100 * ratio:.0f}%)",
            ]
        )
    head = [
        *("precision", "graphs", "most likely token is float32's", "KL, nats", "perplexity (float32's)"),
        "tokens per round (of float32's)",
    ]
    some = next(iter(results["variants"].values()))
    return markdown(head, rows) + f"\n{some['tokens']} tokens of {some['prompts']} prompts and answers.\n"


def compilation(results: dict[str, Any]) -> str:
    """Of benchmarks/compile.py: a row for each model and precision, then how they grow with the weights."""
    rows = []
    for key, part in results["parts"].items():
        model, _, precision = key.rpartition("_")
        exported, weights = part["export"], part["weights"]["target"]
        seconds = f"{exported['seconds']:.0f}"
        if exported["calibration_seconds"]:
            seconds += f" + {exported['calibration_seconds']:.0f}"
        row = [f"{MODELS[model]}, {precision}", f"{weights / 1e6:.0f}", seconds, _gb(exported)]
        for name in ("one", "default"):
            graphs = part[name]["graphs"]
            spent = sum(graph["seconds"] for graph in graphs.values())
            target = graphs["target"]
            row += [f"{spent:.0f}", f"{target['bytes'] / 1e6:.0f} ({target['ratio']:.2f}×)"]
        rows.append([*row, _gb(part["default"])])
    head = [
        *("model", "weights, MB", "export + calibration, s", "peak, GB"),
        *("compile, one profile, s", "engine, MB", "compile, default, s", "engine, MB", "peak, GB"),
    ]
    return markdown(head, rows) + _growth(results["growth"]) + "\n" + _compiler(results) + "\n"


def _growth(lines: dict[str, dict[str, list[float]]]) -> str:
    said = ""
    for precision, figures in lines.items():
        more = {name: line[1] for name, line in figures.items()}
        calibration = ""
        if more["calibration_seconds"]:
            calibration = f", {more['calibration_seconds']:.0f} s to calibration"
        said += (
            f"\nEach GB of {precision} weights adds {more['export_seconds']:.0f} s and "
            f"{more['export_memory_gb']:.1f} GB of memory to the export{calibration}, "
            f"{more['compile_seconds']:.0f} s and {more['compile_memory_gb']:.1f} GB to compiling.\n"
        )
    return said


def _gb(measured: dict[str, Any]) -> str:
    return f"{measured['peak_memory_bytes'] / 1e9:.1f}"


def _compiler(results: dict[str, Any]) -> str:
    env = results["environment"]
    return f"{env['cores']} cores of {env['cpu']}, TensorRT-RTX {env['tensorrt_rtx']}, no GPU."


def _machine(results: dict[str, Any]) -> str:
    env = results["environment"]
    return f"{env['cores']} cores of {env['cpu']}, float32, ONNX Runtime {env['onnxruntime']}."


# page -> results file -> mark on the page -> its table
PAGES: dict[str, dict[str, Tables]] = {
    "README.md": {"cpu_smollm2": {"baselines": baselines, "gains": gains}},
    "docs/benchmarks.md": {
        "cpu_smollm2": {"sets": sets, "trees": trees, "export": export, "transcript": transcript},
        "compile": {"compile": compilation},
        "precision_smollm2": {"precision": precisions},
        "export_scale": {"export_scale": scale_table},
        "head_smollm2": {"head": head_table},
    },
    "recipes/smollm2-135m/eagle3/README.md": {"head_smollm2": {"head": head_table}},
    "docs/training.md": {
        "ablation_smollm2": {"ablation": ablation_table},
        "ablation_smollm2_long": {"ablation_long": ablation_table},
    },
}


if __name__ == "__main__":
    main()
