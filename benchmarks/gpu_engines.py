"""The same measurements with the compiled engines of a bundle, where they load, and its real head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode import Budget, Plan, equality, natural, sampling
from benchmarks.gpu_models import Setup
from benchmarks.gpu_speed import speed
from eagle_run.decoding.tree_spec import parse_spec, spec_of

QUESTIONS = (
    "How do plants turn sunlight into food? Explain it in a few sentences.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Describe a visit to a small town by the sea.",
    "A train leaves at nine and travels 240 km at 80 km/h. When does it arrive, and why?",
)


def measure_engines(
    folder: Path, backend: str, device: str, plan: Plan, *, budget: Budget, rates: Mapping[str, float]
) -> dict[str, Any]:
    """A bundle in one backend. Raises EagleError, with the reason, where it does not load here."""
    setup, own = _load(folder, backend, device)
    limits = (setup.max_nodes or 64, setup.max_seq_len)
    prompt = min(plan.prompt, limits[1] // 2)
    trees = [tree for tree in plan.trees if parse_spec(tree).nodes <= limits[0]]
    plan = replace(
        plan,
        trees=tuple(dict.fromkeys([*([own] if own else []), *trees])),
        prompt=prompt,
        tokens=min(plan.tokens, limits[1] - prompt),
    )
    found: dict[str, Any] = {
        "precision": setup.precision,
        "target_bytes": setup.target_bytes,
        "equality": equality(setup, replace(plan, tokens=min(plan.tokens, 32)), 1),
        "sampling": sampling(setup, plan, 1),
        "real_head": natural(setup, plan, 1),
        "speed": [],
    }
    for batch in dict.fromkeys((1, setup.max_batch)):
        found["speed"].append(speed(setup, plan, batch, budget, rates))
    return found


def _load(folder: Path, backend: str, device: str) -> tuple[Setup, str | None]:
    """The bundle as something to measure, and the spec of its own tree."""
    from eagle_run.engine.loading import load_engine

    engine = load_engine(folder, backend=backend, device=device)
    manifest, runner = engine.bundle.manifest, engine.runner
    ids = runner.draft_to_target
    weights = {name: _bytes(folder, name) for name in ("target", "draft", "fuse")}
    setup = Setup(
        name=f"{manifest.name} {engine.backend}",
        graphs=runner.graphs,
        draft_to_target=torch.arange(manifest.target.vocab_size) if ids is None else ids,
        vocab=manifest.target.vocab_size,
        precision=runner.precision,
        device=runner.device,
        max_seq_len=manifest.limits.max_seq_len,
        chunk=manifest.limits.prefill_chunk,
        target_bytes=weights["target"],
        draft_bytes=weights["draft"] + weights["fuse"],
        max_batch=manifest.limits.max_batch,
        max_nodes=manifest.limits.max_tree_nodes,
        texts=tuple(tuple(engine.tokenizer.encode_prompt(question)) for question in QUESTIONS),
    )
    return setup, None if engine.default_tree is None else spec_of(engine.default_tree)


def _bytes(folder: Path, name: str) -> int:
    """Of a graph's weights, embedding included: what is in the file beside it."""
    data = folder / "onnx" / f"{name}.onnx.data"
    return data.stat().st_size if data.is_file() else 0
