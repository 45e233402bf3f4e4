"""What a precision costs SmolLM2: its target against float32, and how well its draft still guesses.

    python -m benchmarks.precision --data FOLDER        # FOLDER/{mt_bench,humaneval,gsm8k,alpaca}.jsonl

Each variant is built and measured as `eagle-export verify` measures it, on the first questions of each set
and the float32 model's answers. FP8 is calibrated on prompts of our own, never on these. A variant that is
in the file already is not measured again unless --force is given, and only while the code stays the same.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.cpu import SETS, code

VARIANTS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8, down_proj in fp16": {"precision": "fp8", "keep": ("*.down_proj",)},
    "fp8, lm_head too": {"precision": "fp8", "lm_head": True},
}


@click.command(help=__doc__)
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--limit", default=8, show_default=True, help="Questions of each set.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(VARIANTS)))
@click.option("--force", is_flag=True, help="Measure again what the file already has.")
@click.option("--out", default="benchmarks/results/precision_smollm2.json", type=click.Path(path_type=Path))
def main(
    *, data: Path, limit: int, max_new_tokens: int, only: tuple[str, ...], force: bool, out: Path
) -> None:
    known = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    results: dict[str, Any] = known if known.get("code") == code() else {"code": code(), "variants": {}}
    results |= {"limit": limit, "max_new_tokens": max_new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.jsonl"
        lines = [line for name in SETS for line in (data / f"{name}.jsonl").read_text().splitlines()[:limit]]
        questions.write_text("\n".join(lines) + "\n")
        for name in only or VARIANTS:
            if name in results["variants"] and not force:
                click.echo(f"{name}: already in {out}", err=True)
                continue
            start = time.perf_counter()
            results["variants"][name] = measure(VARIANTS[name], questions, max_new_tokens, Path(folder))
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            click.echo(f"{name}: {time.perf_counter() - start:.0f} s", err=True)
    click.echo(json.dumps(results))


def measure(variant: dict[str, Any], questions: Path, max_new_tokens: int, folder: Path) -> dict[str, Any]:
    """Builds the demo in one precision and compares it with float32."""
    from eagle_export.pipeline.build import build
    from eagle_export.pipeline.options import BuildOptions, Fp8Options
    from eagle_export.progress import Progress
    from eagle_export.reference.modules import reference_of
    from eagle_export.verify.accuracy import choose_requests, runnable_graphs
    from eagle_export.verify.accuracy import measure as compare
    from eagle_run.tokenizer import Tokenizer

    fp8 = Fp8Options(keep=variant.get("keep", ()), lm_head=variant.get("lm_head", False))
    options = BuildOptions(
        target="smollm2-135m",
        precision=variant["precision"],
        fp8=fp8,
        out=folder / "bundle",
        measure=False,
        force=True,
    )
    progress = Progress()
    bundle = build(options, progress).bundle
    manifest = bundle.manifest
    reference = reference_of(manifest, precision="fp32")
    own = reference_of(manifest, precision="bf16") if variant["precision"] == "bf16" else reference
    files = {artifact.graph: bundle.file(artifact) for artifact in manifest.artifacts}
    graphs, backend = runnable_graphs(files, own, variant["precision"], manifest.limits.cache_rows)  # type: ignore[arg-type]
    requests = choose_requests(
        Tokenizer.load(bundle.tokenizer_dir),
        manifest.stop_token_ids,
        max_seq_len=manifest.limits.max_seq_len,
        questions=questions,
        max_new_tokens=max_new_tokens,
    )
    assert manifest.tree is not None
    found = compare(
        graphs,
        reference,
        requests,
        progress,
        limits=manifest.limits,
        tree=manifest.tree.shape(),
        backend=backend,
    )
    return {
        **found.model_dump(mode="json"),
        "linears": manifest.quantization.linears if manifest.quantization else 0,
        "kept": manifest.quantization.kept if manifest.quantization else (),
        "bytes": sum(entry.bytes for artifact in manifest.artifacts for entry in artifact.files),
    }


if __name__ == "__main__":
    main()
