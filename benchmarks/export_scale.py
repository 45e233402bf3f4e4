"""What the export of a big target takes: seconds and peak memory for shapes of 1B, 8B and 70B parameters.

    python -m benchmarks.export_scale --json benchmarks/results        # some 20 minutes on two cores
    python -m benchmarks.export_scale --shapes 70b --ways linked

A shape is exported with its EAGLE-3 head by `eagle-export build` in bfloat16, with weights linked and with
weights written; and, to compare, the target alone by plain `torch.onnx.export` of the loaded model. Every
export is a process of its own. What does not fit this machine's disk or memory is said with its figures.
Checkpoints are sparse (see sparse_checkpoint.py): weights are zeros that are read, hashed and converted like
any others. What the file already has of the same code is kept, unless --again is given.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import child, sparse_checkpoint
from benchmarks.cpu import code
from eagle_export.inspection.describe import size

WAYS = ("linked", "written", "torch")
FILE = "export_scale.json"
_SIZES = ("--max-seq-len", "4096", "--max-batch", "1", "--precision", "bf16", "--no-measure")
_SPARE = 1_000_000_000  # bytes of memory that are left to the rest of the machine


@click.command(help=__doc__)
@click.option(
    "--json", "out", default="benchmarks/results", type=click.Path(path_type=Path), show_default=True
)
@click.option("--shapes", default="1b,8b,70b", show_default=True, help=", ".join(sparse_checkpoint.SHAPES))
@click.option("--ways", default=",".join(WAYS), show_default=True)
@click.option("--again", is_flag=True, help="Measure again what the file already has.")
@click.option(
    "--work", type=click.Path(path_type=Path, exists=True), help="Folder for the checkpoints and bundles."
)
def main(out: Path, shapes: str, ways: str, again: bool, work: Path | None) -> None:
    asked, tried = _names(shapes, tuple(sparse_checkpoint.SHAPES)), _names(ways, WAYS)
    where = out / FILE
    known = json.loads(where.read_text()) if where.is_file() else {}
    results: dict[str, Any] = known if known.get("code") == code() else {"code": code(), "shapes": {}}
    results["environment"] = _environment()
    for shape in asked:
        found = results["shapes"].setdefault(shape, {})
        missing = [way for way in tried if again or way not in found]
        if not missing:
            click.echo(f"{shape}: already in {where}", err=True)
            continue
        with tempfile.TemporaryDirectory(dir=work, prefix="export_scale_") as folder:
            target = sparse_checkpoint.write_target(Path(folder) / "target", shape)
            head = sparse_checkpoint.write_head(Path(folder) / "head", shape)
            found |= {"target_bytes": _length(target), "head_bytes": _length(head)}
            for way in missing:
                found[way] = measure(way, target, head, Path(folder))
                where.parent.mkdir(parents=True, exist_ok=True)
                where.write_text(json.dumps(results, indent=1) + "\n")
                click.echo(f"{shape} {way}: {_said(found[way])}", err=True)
    click.echo(json.dumps(results))


def measure(way: str, target: Path, head: Path, work: Path) -> dict[str, Any]:
    """Exports in one of WAYS: seconds, CPU seconds, peak memory and bytes written; or why it cannot be here.

    Nothing is left in `work`. No hash of a checkpoint is remembered from an earlier export.
    """
    made, cache = work / "made", work / "cache"
    if way == "torch":
        needed, free = 1.1 * _length(target), shutil.disk_usage(work).free
        if free < needed:
            return {"refused": f"about {size(int(needed))} of disk are needed, {size(free)} are free"}
        module, arguments = "benchmarks.export_torch", (target, made / "target.onnx")
    else:
        paths = ("--target", target, "--head", head, "--out", made / "bundle")
        link = ("--link-weights",) if way == "linked" else ()
        module, arguments = "eagle_export", ("build", *paths, *link, *_SIZES, "--json")
    made.mkdir()
    limit = psutil.virtual_memory().available - _SPARE
    try:
        ended = child.run(module, *arguments, memory_limit=limit, environment={"XDG_CACHE_HOME": str(cache)})
        return _result(ended, limit, made)
    finally:
        for folder in (made, cache):
            shutil.rmtree(folder, ignore_errors=True)


def _result(ended: child.Ended, limit: int, made: Path) -> dict[str, Any]:
    spent = {"seconds": round(ended.seconds, 1), "cpu_seconds": round(ended.cpu_seconds, 1)}
    peak = {"peak_memory_bytes": ended.peak_memory_bytes}
    if ended.stopped:
        return {"refused": f"more than {size(limit)} of memory are needed", **spent, **peak}
    if ended.code:
        said = re.search(r"about .* are needed, .*", ended.errors)
        if said is None:
            raise click.ClickException(f"the export ended with {ended.code}:\n{ended.errors.strip()[-2000:]}")
        return {"refused": said[0], **spent, **peak}
    steps = json.loads(ended.out)["steps"]
    return {**spent, **peak, "written_bytes": _written(made), "steps": steps}


def _length(folder: Path) -> int:
    """Bytes of the weight files as they are read, holes counted."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _written(folder: Path) -> int:
    """Bytes of the files that are nowhere else: links are none."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def _said(found: dict[str, Any]) -> str:
    if "refused" in found:
        return str(found["refused"])
    written, peak = found["written_bytes"] / 1e9, found["peak_memory_bytes"] / 1e9
    return f"{found['seconds']:.0f} s, {peak:.1f} GB of memory, {written:.1f} GB written"


def _names(value: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in value.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"expected some of {', '.join(known)}, found {', '.join(unknown)}")
    return names


def _environment() -> dict[str, Any]:
    from eagle_run.backends.environment import environment

    memory = psutil.virtual_memory().total
    return {**environment(0), "memory_bytes": memory, "load": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    sys.exit(main())
