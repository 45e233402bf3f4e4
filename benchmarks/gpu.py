"""Decoding on a GPU: whole rounds as CUDA graphs, against plain decoding, their own graphs and the hardware.

    python benchmarks/gpu.py --json benchmarks/results            # writes gpu_<name>.json there
    python benchmarks/gpu.py --bundle FOLDER --engines-only       # a bundle's TensorRT engines alone
    python benchmarks/gpu.py --dry-run                            # tiny models on a CPU: does it all run?

Needs torch and transformers, no download and no installation: random weights in the sizes of real models.
Each section is written as it is done. One that fails or does not fit in --seconds is left out, and named. The
last line on stdout is all of it as JSON; progress and a table go to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

_BEGIN = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT / "runtime", ROOT):  # from a checkout, installed or not
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import torch  # noqa: E402

from benchmarks.gpu_decode import Budget, Plan, equality, sampling  # noqa: E402
from benchmarks.gpu_engines import measure_engines  # noqa: E402
from benchmarks.gpu_measure import copy_rate, product_rate  # noqa: E402
from benchmarks.gpu_models import SIZES, RandomModel, random_model  # noqa: E402
from benchmarks.gpu_report import goals, machine, table  # noqa: E402
from benchmarks.gpu_speed import speed  # noqa: E402
from eagle_run.decoding.tree_spec import parse_spec  # noqa: E402
from eagle_run.errors import first_line  # noqa: E402

LARGE, SMALL = "llama3.1-8b", "smollm2-135m"
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class Section:
    """`seconds`: about what it takes; it is left out when there is less."""

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]


@dataclass
class Benchmark:
    """The options, the models that were made, and what has been measured so far."""

    device: torch.device
    budget: Budget
    out: Path | None
    dry_run: bool
    results: dict[str, Any]
    models: dict[str, RandomModel] = field(default_factory=dict)
    made_steady: set[str] = field(default_factory=set)

    def do(self, section: Section) -> None:
        """Runs a section and writes what there is. Whatever it raises becomes a line of the results."""
        if self.budget.left < section.seconds:
            reason = f"{self.budget.left:.0f} s left, about {section.seconds:.0f} s needed"
            self.results["skipped"][section.name] = reason
            print(f"{section.name}: left out, {reason}", file=sys.stderr)
            self.save()
            return
        start = time.perf_counter()
        try:
            self.results["sections"][section.name] = section.run()
        except Exception as error:  # the other sections may still work
            self.results["errors"][section.name] = f"{type(error).__name__}: {first_line(error)}"
            traceback.print_exc()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.results["seconds"] = round(time.perf_counter() - _BEGIN, 1)
        self.save()
        print(f"{section.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    def save(self) -> None:
        self.results["goals"] = goals(self.results)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def model(self, name: str, *, steady: bool) -> RandomModel:
        """A model, made when it is first asked for; once `steady`, it stays so."""
        if name not in self.models:
            plan = self.plan(1)
            trees = [parse_spec(tree).cache_rows for tree in plan.trees]
            self.models[name] = random_model(
                name,
                self.device,
                max_seq_len=plan.prompt + plan.tokens + 32,
                chunk=plan.prompt,
                rows=max(trees),
                dtype=torch.bfloat16,
            )
        if steady and name not in self.made_steady:
            self.models[name].steady()
            self.made_steady.add(name)
        return self.models[name]

    def plan(self, batch: int, *, check: bool = False) -> Plan:
        """What is measured with `batch` slots; `check`: where the question is whether it is right."""
        if self.dry_run:
            trees = ("chain:2", "dynamic:3,3,8")
            return Plan(trees, shares=(0.5, 1.0), prompt=16, tokens=12, uncaptured_tokens=4, repeats=1)
        if check:
            return Plan(("chain:4", "dynamic:8,10,60"), tokens=32)
        if batch < 4:
            return Plan(("chain:4", "dynamic:5,6,24", "dynamic:8,10,60"))
        if batch < 16:
            return Plan(("chain:3", "dynamic:5,6,24"), shares=(0.5, 0.8), repeats=2)
        trees = ("chain:3", "dynamic:3,4,10") if batch < 64 else ("chain:2", "chain:3")
        return Plan(trees, shares=(0.8,), prompt=64, tokens=64, repeats=2)

    def ceiling(self) -> dict[str, Any]:
        """What the device's memory and cores do at best."""
        size, width = (1 << 22, 256) if self.dry_run else (1 << 32, 8192)
        return {
            "copy_bytes_per_second": copy_rate(self.device, size),
            "product_per_second": product_rate(self.device, torch.bfloat16, width),
        }

    def right(self, name: str, check: Callable[..., dict[str, Any]], batch: int) -> dict[str, Any]:
        return check(self.model(name, steady=False).setup, self.plan(batch, check=True), batch)

    def fast(self, name: str, batch: int) -> dict[str, Any]:
        setup = self.model(name, steady=True).setup
        rates = self.results["sections"].get("ceiling", {})
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        found = speed(setup, self.plan(batch), batch, self.budget, rates)
        if self.device.type == "cuda":
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return {"target_bytes": setup.target_bytes, "draft_bytes": setup.draft_bytes, **found}

    def sections(self, models: list[str], batches: list[int]) -> list[Section]:
        """In the order of what they are worth. Equality comes before speed: see `RandomModel.steady`."""
        scale = 0.0 if self.dry_run else 1.0
        cost = {SMALL: 1.0, LARGE: 1.5}
        found = []
        for name in models:
            long = scale * cost.get(name, 1.0)
            found += [
                Section(f"{name} equality", 20 * long, partial(self.right, name, equality, 2)),
                Section(f"{name} sampling", 12 * long, partial(self.right, name, sampling, 1)),
            ]
            found += self._speeds(name, batches[:1], 30 * long)
        for batch in batches[1:]:
            for name in reversed(models):
                seconds = (20 + batch / 2) * cost.get(name, 1.0)  # prompts are prefilled one by one
                found += self._speeds(name, [batch], scale * seconds)
        return found

    def engines(self, folder: Path, backend: str) -> dict[str, Any]:
        rates = self.results["sections"].get("ceiling", {})
        return measure_engines(
            folder, backend, self.device.type, self.plan(1), budget=self.budget, rates=rates
        )

    def _speeds(self, name: str, batches: list[int], seconds: float) -> list[Section]:
        return [
            Section(f"{name} batch {batch}", seconds, partial(self.fast, name, batch)) for batch in batches
        ]


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="a file, or a folder for gpu_<name>.json")
    parser.add_argument("--seconds", type=float, default=460, help="for all of it (default: %(default)s)")
    parser.add_argument("--models", help=f"of random weights, by commas (default: {SMALL},{LARGE})")
    parser.add_argument("--batches", help="slots, by commas (default: 1,4,16,64)")
    parser.add_argument(
        "--bundle", type=Path, action="append", default=[], help="also measure its engines; may be repeated"
    )
    parser.add_argument(
        "--backends", default="tensorrt,tensorrt-rtx", help="for bundles (default: %(default)s)"
    )
    parser.add_argument("--engines-only", action="store_true", help="only the bundles")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    found = parser.parse_args(arguments)
    found.models = (found.models or ("tiny,tinier" if found.dry_run else f"{SMALL},{LARGE}")).split(",")
    if unknown := sorted(set(found.models) - set(SIZES)):
        parser.error(f"--models should be of {', '.join(SIZES)}, found {', '.join(unknown)}")
    found.batches = (found.batches or ("1,2" if found.dry_run else "1,4,16,64")).split(",")
    if not all(batch.isdecimal() and int(batch) > 0 for batch in found.batches):
        parser.error(f"--batches should be numbers from 1, found {','.join(found.batches)}")
    found.backends = found.backends.split(",")
    if unknown := sorted(set(found.backends) - set(BACKENDS)):
        parser.error(f"--backends should be of {', '.join(BACKENDS)}, found {', '.join(unknown)}")
    if not found.seconds > 0:
        parser.error(f"--seconds should be above 0, found {found.seconds}")
    if found.engines_only and not found.bundle:
        parser.error("--engines-only needs --bundle")
    if not found.dry_run and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA GPU here; --dry-run takes the CPU")
    return found


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        # It is preferred where it can be used, but plans each new shape for a tenth of a second and more.
        torch.backends.cuda.enable_cudnn_sdp(False)
    here = machine(device)
    name = re.sub(r"[^a-z0-9]+", "_", here["name"].lower()).strip("_")
    out = given.json / f"gpu_{name}.json" if given.json and given.json.suffix != ".json" else given.json
    results = {"benchmark": "gpu", "dry_run": given.dry_run, "machine": here, "seconds": 0.0}
    results |= {"sections": {}, "skipped": {}, "errors": {}}
    bench = Benchmark(device, Budget(given.seconds, _BEGIN), out, given.dry_run, results)
    bench.save()  # a place that cannot be written should show before anything is measured
    bench.do(Section("ceiling", 0, bench.ceiling))
    for folder in given.bundle:
        for backend in given.backends:
            name = f"{folder.name} {backend}"
            bench.do(Section(name, 30, partial(bench.engines, folder, backend)))
    if not given.engines_only:
        for section in bench.sections(given.models, [int(batch) for batch in given.batches]):
            bench.do(section)
    bench.save()
    print(table(results), file=sys.stderr)
    print(json.dumps(results))
    return 1 if results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
