"""What export and compilation cost, and how that grows with the model: SmolLM2, random Llamas of 0.3B and 1B.

    python -m benchmarks.compile                                # everything, some 15 minutes on two cores
    python -m benchmarks.compile --model 0.3b --precision fp8

Every step is a process of its own, the command that a user would run, so that its peak memory is its own. A
bundle is compiled twice for TensorRT-RTX: with one profile for one GPU architecture, and with the default
profiles and architectures. Each bundle is deleted once it is measured; parts that are in the file already
are not measured again unless --force is given, and only while the code stays the same.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks import child
from benchmarks.cpu import code

MODELS = ("smollm2", "0.3b", "1b")
OTHERS = ("tiny",)  # to try this script out
PRECISIONS = ("fp16", "fp8")
# The same shapes for every model, so that only the model differs.
SHAPES = (
    *("--max-seq-len", "2048", "--max-batch", "4", "--prefill-chunk", "128", "--max-tree-nodes", "64"),
    *("--tree", "dynamic", "--depth", "2", "--branch", "3", "--nodes", "5"),
)
ONE = ("--profiles", "prefill", "--target-arch", "sm89")


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice((*MODELS, *OTHERS)))
@click.option("--precision", "precisions", multiple=True, type=click.Choice(PRECISIONS))
@click.option("--force", is_flag=True, help="Measure again what the file already has.")
@click.option("--work", type=click.Path(path_type=Path, exists=True), help="Folder for some 15 GB.")
@click.option("--out", default="benchmarks/results/compile.json", type=click.Path(path_type=Path))
def main(
    models: tuple[str, ...], precisions: tuple[str, ...], force: bool, work: Path | None, out: Path
) -> None:
    known = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    results: dict[str, Any] = known if known.get("code") == code() else {"code": code(), "parts": {}}
    results["environment"] = _environment()
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for model in models or MODELS:
            for precision in precisions or PRECISIONS:
                key = f"{model}_{precision}"
                if key in results["parts"] and not force:
                    click.echo(f"{key}: already in {out}", err=True)
                    continue
                start = time.perf_counter()
                results["parts"][key] = measure(model, precision, Path(folder))
                results["growth"] = growth(results["parts"])
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                click.echo(f"{key}: {time.perf_counter() - start:.0f} s", err=True)
            shutil.rmtree(Path(folder) / model, ignore_errors=True)
    click.echo(json.dumps(results))


def measure(model: str, precision: str, work: Path) -> dict[str, Any]:
    """Export, and both compilations, of one model in one precision. Leaves the random weights in `work`."""
    source, bundle = _source(model, work / model), work / "bundle"
    options = (*source, "--precision", precision, *SHAPES, "--json")
    part: dict[str, Any] = {
        "plan": _step("build", "--plan", "--backend", "tensorrt-rtx", *options)["result"],
        "export": _export(_step("build", "--no-measure", "--out", bundle, *options)),
    }
    part["weights"] = _weights(bundle)
    seen: set[str] = set()
    for name, flags in (("one", ONE), ("default", ())):
        step = _step("compile", bundle, "--backend", "tensorrt-rtx", *flags, "--json")
        part[name] = _compiled(step, part["weights"], seen)
    shutil.rmtree(bundle)
    return part


def growth(parts: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By precision and figure: [at no weights, for each GB of weights], a line through the models."""
    import numpy

    figures = {
        "export_seconds": lambda part: part["export"]["seconds"],
        "calibration_seconds": lambda part: part["export"]["calibration_seconds"],
        "export_memory_gb": lambda part: part["export"]["peak_memory_bytes"] / 1e9,
        "compile_seconds": lambda part: _compiler_seconds(part["one"]),
        "default_compile_seconds": lambda part: _compiler_seconds(part["default"]),
        "compile_memory_gb": lambda part: part["one"]["peak_memory_bytes"] / 1e9,
        "engine_gb": lambda part: part["one"]["bytes"] / 1e9,
    }
    lines: dict[str, dict[str, list[float]]] = {}
    for precision in PRECISIONS:
        rows = [part for key, part in parts.items() if key.endswith(f"_{precision}")]
        if len(rows) < 2:
            continue
        sizes = [sum(part["weights"].values()) / 1e9 for part in rows]
        lines[precision] = {}
        for name, figure in figures.items():
            slope, start = numpy.polyfit(sizes, [figure(part) for part in rows], 1)
            lines[precision][name] = [round(float(start), 3), round(float(slope), 3)]
    return lines


def _compiler_seconds(compiled: dict[str, Any]) -> float:
    """Of the compiler's processes alone, without the command around them."""
    return sum(graph["seconds"] for graph in compiled["graphs"].values())


def _source(model: str, folder: Path) -> tuple[str, ...]:
    """The build's options that name a model; random weights are written the first time."""
    if model == "smollm2":
        return ("--target", "smollm2-135m")
    if not folder.is_dir():
        _run("benchmarks.random_llama", model, folder)
    return ("--target", str(folder / "target"), "--head", str(folder / "head"))


def _step(command: str, *arguments: str | Path) -> dict[str, Any]:
    """Runs a command of eagle-export: its JSON as `result`, wall `seconds`, `peak_memory_bytes` of it and
    whatever it started."""
    return _run("eagle_export", command, *arguments)


def _run(module: str, *arguments: str | Path) -> dict[str, Any]:
    ended = child.run(module, *arguments)
    if ended.code:
        command = " ".join(map(str, ("-m", module, *arguments)))
        raise click.ClickException(f"{command} ended with {ended.code}:\n{ended.errors.strip()[-2000:]}")
    return {
        "result": json.loads(ended.out),
        "seconds": ended.seconds,
        "peak_memory_bytes": ended.peak_memory_bytes,
    }


def _export(step: dict[str, Any]) -> dict[str, Any]:
    steps: dict[str, float] = step["result"]["steps"]
    calibration = sum(value for name, value in steps.items() if "calibrat" in name)
    return {
        "seconds": round(step["seconds"] - calibration, 1),
        "calibration_seconds": round(calibration, 1),
        "peak_memory_bytes": step["peak_memory_bytes"],
        "bytes": step["result"]["bytes"],
        "steps": steps,
    }


def _weights(bundle: Path) -> dict[str, int]:
    """Bytes of each ONNX graph with its weights, in the precision of the bundle."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    return {
        artifact["graph"]: sum(file["bytes"] for file in artifact["files"])
        for artifact in manifest["artifacts"]
        if artifact["backend"] == "onnx"
    }


def _compiled(step: dict[str, Any], weights: dict[str, int], seen: set[str]) -> dict[str, Any]:
    """What one `compile` made; engines of an earlier one, in `seen`, are not its."""
    graphs = {}
    for artifact in step["result"]["engines"]:
        if artifact["file"] in seen:
            continue
        seen.add(artifact["file"])
        engine, graph = artifact["engine"], artifact["graph"]
        graphs[graph] = {
            "seconds": engine["seconds"],
            "peak_memory_bytes": engine["peak_memory_bytes"],
            "bytes": artifact["bytes"],
            "ratio": round(artifact["bytes"] / weights[graph], 3),
            "profiles": [profile["name"] for profile in engine["profiles"]],
            "compute_capabilities": artifact["compute_capabilities"],
        }
    return {
        "seconds": round(step["seconds"], 1),
        # The compiler's process counts its own memory too: the kernel rounds differently in each place.
        "peak_memory_bytes": max(
            step["peak_memory_bytes"], *(entry["peak_memory_bytes"] for entry in graphs.values())
        ),
        "bytes": sum(entry["bytes"] for entry in graphs.values()),
        "graphs": graphs,
    }


def _environment() -> dict[str, Any]:
    from importlib.metadata import version

    from eagle_run.backends.environment import environment

    return {**environment(0), "tensorrt_rtx": version("tensorrt-rtx")}


if __name__ == "__main__":
    main()
