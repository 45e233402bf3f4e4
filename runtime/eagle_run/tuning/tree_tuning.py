"""The tree "auto": the tree that decodes fastest here, by measurement, and never one that loses to none.

What pays depends on how a forward's cost grows with its rows (almost flat on a GPU, steep on a few CPU cores)
and on how often the head is right. So: time forwards of several sizes; decode a little with a wide tree and
note which of its paths were accepted; predict every small tree from the two; run the few best, and the
bundle's own, against plain decoding in turns on the same prompts; take the winner if it wins clearly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from eagle_run.backends.environment import environment
from eagle_run.backends.stream import on_stream
from eagle_run.bundle.hashing import cache_dir, write_cache
from eagle_run.decoding.config import PLAIN, AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.sampling import stack
from eagle_run.decoding.tree import TreeShape
from eagle_run.decoding.tree_spec import describe, parse_spec, spec_of
from eagle_run.engine.engine import Engine, one_torch_thread
from eagle_run.engine.offline import OfflineRequest, OfflineRun, run_offline
from eagle_run.engine.prefill import kv_bucket, prefill
from eagle_run.engine.round import run_round
from eagle_run.errors import EagleError
from eagle_run.json_files import read_json
from eagle_run.params import SamplingParams
from eagle_run.tuning.cost_model import Costs, decide, dynamic_like, interpolate, rank_paths, shortlist
from eagle_run.tuning.forward_time import forward_seconds, fuse_seconds

_PROMPTS = (
    "Explain how rainbows form, and why no two people see the same one.",
    "Write a Python function that merges two sorted lists, with a docstring and an example.",
    "A baker makes 12 trays of 18 rolls and sells 175 of them. How many are left? Think step by step.",
    "Write a short letter to a landlord asking for a repair of the kitchen window.",
    "What are the main differences between a virus and a bacterium?",
)


@dataclass(frozen=True)
class Choice:
    """What was picked. `speedup` is over plain decoding (1.0 for plain decoding itself)."""

    tree: TreeShape
    speedup: float
    reason: str


def auto_tree(
    engine: Engine,
    *,
    params: SamplingParams,
    acceptance: AcceptanceRule = AcceptanceRule.TOPK,
    retune: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Choice:
    """The fastest tree for this bundle, machine and way of sampling: remembered, or measured now.

    `log` gets one line on what was picked and why. The memory is trees.json in the user's cache folder.
    """
    if engine.default_tree is None:
        return Choice(TreeShape.plain(), 1.0, "the bundle has no draft head")
    key = _key(engine, params, acceptance)
    choice = None if retune else _recall(key)
    if choice is None:
        log("tree auto: measuring, about 15 seconds, once for this bundle and machine")
        choice = tune(engine, params=params, acceptance=acceptance)
        _remember(key, choice)
    log(f"tree auto: {describe(choice.tree)}: {choice.reason} ({spec_of(choice.tree)})")
    return choice


def tune(
    engine: Engine,
    *,
    params: SamplingParams,
    acceptance: AcceptanceRule = AcceptanceRule.TOPK,
    seconds: float = 15.0,
) -> Choice:
    """Measures and picks. `seconds` is what it aims at; a slow model takes longer, in shorter runs."""
    start = time.perf_counter()
    requests = _requests(engine, params)
    if not requests:
        return Choice(TreeShape.plain(), 1.0, "the context is too short to measure in")
    with one_torch_thread():
        entrants = _entrants(engine, requests, acceptance, seconds)
        if not entrants:
            return Choice(TreeShape.plain(), 1.0, "the caches have no room to measure a tree in")
        ratios = _heats(engine, entrants, requests, acceptance, seconds)
    tree, speedup = decide(ratios)
    spent = f"measured in {time.perf_counter() - start:.0f} s"
    if tree.kind == "plain":
        ratio, closest = max((median(values), spec_of(shape)) for shape, values in ratios.items())
        return Choice(tree, 1.0, f"no tree beats it clearly ({closest}: {ratio:.2f}x); {spent}")
    return Choice(tree, round(speedup, 4), f"{speedup:.2f}x plain decoding; {spent}")


def _requests(engine: Engine, params: SamplingParams) -> list[list[OfflineRequest]]:
    """What is decoded while measuring: `batch` requests each, the built-in prompts in turn."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None  # a bundle has one
    params = replace(params, n=1, max_tokens=256)
    prompts = [tuple(tokenizer.encode_prompt(prompt)) for prompt in _PROMPTS]
    room = engine.limits.max_seq_len // 2  # what a prompt may take of a short context
    made = [OfflineRequest(prompt, params) for prompt in prompts if len(prompt) <= room]
    batch = engine.runner.batch
    return [[made[(i + slot) % len(made)] for slot in range(batch)] for i in range(len(made))]


def _entrants(
    engine: Engine, requests: list[list[OfflineRequest]], acceptance: AcceptanceRule, seconds: float
) -> list[TreeShape]:
    """Trees worth running: the two best predicted, a dynamic one of the best's size, the bundle's own.

    Empty when not one round of a tree could be measured.
    """
    runner = engine.runner
    room = runner.cache_rows - engine.limits.max_seq_len  # what a round may write behind any sequence
    most = min(engine.limits.max_tree_nodes or room, room)
    if most < 2:
        return []
    capture = engine.cuda_graphs.enabled
    target, drafting = (
        forward_seconds(runner, graph, most, capture=capture) for graph in ("target", "draft")
    )
    wide = _wide_tree(target, most)
    paths, glue = _survey(engine, requests, wide, seconds / 4)
    if not paths:
        return []
    plain = run_offline(engine, [request.shortened(8) for request in requests[0]], PLAIN)
    plain_glue = median(time.glue if runner.timed else 0.0 for time in plain.round_times)
    per_level = max(median(glue) - plain_glue, 0) / len(wide.levels)
    costs = Costs(target, drafting, (plain_glue, per_level), fuse_seconds(runner, capture=capture))
    found = shortlist(costs, paths, seen=wide, max_nodes=most, keep=2)
    if acceptance is AcceptanceRule.TOPK:
        best = found[0]
        if best.depth > 1:
            found.append(dynamic_like(best))
        assert engine.default_tree is not None  # `auto_tree` has seen to that
        found.append(engine.default_tree)
    return [shape for shape in dict.fromkeys(found) if shape.cache_rows <= room]


def _wide_tree(target: Mapping[int, float], max_nodes: int) -> TreeShape:
    """The tree whose accepted paths are noted: all candidates verified, wide but not too dear.

    Wider shows more, but a verification that takes long shows it less often.
    """
    for depth, top_k in ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2)):
        nodes = 1 + top_k + (depth - 1) * top_k**2
        affordable = interpolate(target, nodes) <= 2.5 * target[1] or nodes <= 11
        if affordable and nodes <= max_nodes:
            return TreeShape.dynamic(depth, top_k, nodes)
    return TreeShape.chain(max_nodes - 1)


def _survey(
    engine: Engine, requests: list[list[OfflineRequest]], shape: TreeShape, seconds: float
) -> tuple[list[tuple[int, ...]], list[float]]:
    """(ranks of every accepted path, seconds of every round outside the graphs) with the wide tree.

    Both are empty when the caches have no room for a round. On a GPU rounds are captured when it counts, and
    what lies between their graphs is small: it is taken for nothing.
    """
    runner, limit = engine.runner, time.perf_counter() + seconds
    paths: list[tuple[int, ...]] = []
    glue: list[float] = []
    for number, group in enumerate(itertools.cycle(requests), start=1):
        with on_stream(runner.device):
            _survey_group(engine, group, shape, paths, glue)
        if time.perf_counter() > limit or (number == len(requests) and not glue):
            break
    return paths, glue


def _survey_group(
    engine: Engine,
    group: list[OfflineRequest],
    shape: TreeShape,
    paths: list[tuple[int, ...]],
    glue: list[float],
) -> None:
    """A few rounds of one request a slot; adds to `paths` and `glue`."""
    runner = engine.runner
    state = runner.new_state(shape.depth + 1, stack([request.params for request in group], runner.device))
    for slot, request in enumerate(group):
        prefill(runner, state, slot, request.prompt_token_ids, chunk=engine.limits.prefill_chunk)
    for _ in range(12):
        longest = int(state.length.max())
        rows = longest + shape.cache_rows
        if longest >= engine.limits.max_seq_len or rows > runner.cache_rows:
            break
        runner.clock.reset()
        start = time.perf_counter()
        kv = kv_bucket(rows, runner.cache_rows)
        result = run_round(runner, state, SpeculativeConfig(shape), kv=kv)
        ends = result.path.nodes[:, -1].tolist()
        spent = time.perf_counter() - start - sum(runner.clock.seconds.values())
        glue.append(spent if runner.timed else 0.0)
        paths += [
            rank_paths(table)[end] for table, end in zip(result.plan.parents.tolist(), ends, strict=True)
        ]


def _heats(
    engine: Engine,
    shapes: list[TreeShape],
    requests: list[list[OfflineRequest]],
    acceptance: AcceptanceRule,
    seconds: float,
) -> dict[TreeShape, list[float]]:
    """Rates over plain decoding's, per heat. All run each prompt in turn; the slower drop out.

    Three heats at least; a slow model gets no more when the time is over.
    """
    limit = time.perf_counter() + seconds
    ratios: dict[TreeShape, list[float]] = {shape: [] for shape in shapes}
    tokens = 16
    for heat, group in enumerate(requests):
        if heat >= 3 and time.perf_counter() > limit:
            break
        running = [TreeShape.plain(), *ratios]
        running = running[heat % len(running) :] + running[: heat % len(running)]
        short = [request.shortened(tokens) for request in group]
        start = time.perf_counter()
        rates = {
            shape: _rate(run_offline(engine, short, SpeculativeConfig(shape, acceptance)))
            for shape in running
        }
        spent = (time.perf_counter() - start) / len(running)
        for shape, values in ratios.items():
            values.append(rates[shape] / rates[TreeShape.plain()])
        keep = 3 if heat == 0 else 2
        best = sorted(ratios, key=lambda shape: median(ratios[shape]), reverse=True)[:keep]
        ratios = {shape: ratios[shape] for shape in best}
        # What is left of the time, spread over the runs to come.
        tokens = max(8, min(48, int(tokens * 0.6 * seconds / len(requests) / (len(ratios) + 1) / spent)))
    return ratios


def _rate(run: OfflineRun) -> float:
    """Tokens per second of the median round: one that something else disturbed does not count."""
    seconds = median(time.total for time in run.round_times)
    return run.metrics.tokens_per_round / seconds


def _key(engine: Engine, params: SamplingParams, acceptance: AcceptanceRule) -> str:
    """Everything that the choice may depend on, hashed."""
    assert engine.bundle is not None  # or there is no tree to choose
    manifest = engine.bundle.manifest
    facts = {
        "files": sorted(entry.sha256 for artifact in manifest.artifacts for entry in artifact.files),
        "tree": manifest.tree.model_dump() if manifest.tree else None,
        "engine": [engine.backend, engine.device, engine.runner.batch, engine.cuda_graphs.enabled],
        "sampling": [params.temperature, params.filter_k, params.top_p, params.min_p],
        "acceptance": str(acceptance),
        "machine": environment(engine.threads),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _recall(key: str) -> Choice | None:
    entry: Any = _remembered().get(key)
    try:
        return Choice(parse_spec(entry["tree"]), float(entry["speedup"]), "remembered: " + entry["reason"])
    except (TypeError, KeyError, ValueError, EagleError):
        return None  # nothing there, or written by another version


def _remember(key: str, choice: Choice) -> None:
    entry = {"tree": spec_of(choice.tree), "speedup": choice.speedup, "reason": choice.reason}
    known = {**_remembered(), key: entry}
    write_cache(cache_dir("eagle-run") / "trees.json", json.dumps(known, indent=1).encode())


def _remembered() -> dict[str, Any]:
    try:
        known = read_json(cache_dir("eagle-run") / "trees.json")
    except EagleError:  # nothing there, or nothing that can be read
        return {}
    return known if isinstance(known, dict) else {}
