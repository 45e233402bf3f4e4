"""What an export takes without this project: Transformers loads the model, `torch.onnx.export` writes it.

    python -m benchmarks.export_torch TARGET_FOLDER OUT.onnx

The graph is the plain forward of a prompt, from token ids to logits, without caches, tree, features or head.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn


class Logits(nn.Module):
    """input_ids i64[B, T] -> logits [B, T, V]"""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@click.command(help=__doc__)
@click.argument("target", type=click.Path(path_type=Path, exists=True))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--precision", type=click.Choice(("bf16", "fp32")), default="bf16", show_default=True)
def main(target: Path, out: Path, precision: str) -> None:
    from transformers import AutoModelForCausalLM

    start = time.perf_counter()
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    loaded = time.perf_counter()
    dynamic = {"input_ids": {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}}
    with torch.no_grad():
        program = torch.onnx.export(
            Logits(model),
            kwargs={"input_ids": torch.arange(10).reshape(2, 5)},
            dynamo=True,
            opset_version=20,
            dynamic_shapes=dynamic,
            verbose=False,
        )
    assert program is not None
    traced = time.perf_counter()
    program.save(out, external_data=True)
    steps = {"load": loaded - start, "trace": traced - loaded, "save": time.perf_counter() - traced}
    click.echo(json.dumps({"steps": {name: round(seconds, 2) for name, seconds in steps.items()}}))


if __name__ == "__main__":
    main()
