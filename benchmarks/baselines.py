"""Plain greedy decoding of the same model by others, for a comparison in one process on the same prompts.

Each decoder is a function (prompt ids, new tokens) -> (tokens, seconds of decoding); prefill is not timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int], int], tuple[list[int], float]]


def ours(engine: Any) -> Decode:
    """Plain decoding of eagle-run: the tree that is only a root."""
    from eagle_run.decoding.config import PLAIN
    from eagle_run.engine.offline import OfflineRequest, run_offline
    from eagle_run.params import SamplingParams

    def decode(prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        run = run_offline(engine, [OfflineRequest(tuple(prompt), params)], PLAIN)
        return list(run.token_ids[0]), run.metrics.decode_seconds

    return decode


def transformers(folder: Path, threads: int) -> Decode:
    """`model.generate` in float32. Its prefill (timed as a run of one new token) is taken off."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start

    def decode(prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        _, prefill = run(prompt, 1)
        tokens, seconds = run(prompt, new_tokens + 1)
        return tokens[:new_tokens], seconds - prefill

    return decode


def onnxruntime_genai(folder: Path, work: Path, threads: int | None) -> Decode:
    """onnxruntime-genai with the model of its own builder (`-p fp32 -e cpu`), kept in `work`.

    With `threads` None it runs as its builder configured it; else with that many threads in an operator.
    """
    import onnxruntime_genai as genai

    model_folder = work / "genai"
    if not (model_folder / "genai_config.json").is_file():
        subprocess.run(
            [
                *(sys.executable, "-m", "onnxruntime_genai.models.builder"),
                *("-i", folder, "-o", model_folder, "-p", "fp32", "-e", "cpu", "-c", work / "cache"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    config = genai.Config(str(model_folder))
    if threads:
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
        config.overlay(json.dumps(options))
    model = genai.Model(config)

    def decode(prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        params = genai.GeneratorParams(model)
        length = len(prompt) + new_tokens + 1
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(list(prompt))
        generator.generate_next_token()  # the token that prefill gives
        start = time.perf_counter()
        for _ in range(new_tokens):
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return list(generator.get_sequence(0))[len(prompt) :][:new_tokens], seconds

    return decode
