"""The tables that say how good a head is: in docs/benchmarks.md, docs/training.md, the demo head's card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import SETS, markdown

RUNS = {
    "eagle1": "EAGLE-1: regress the feature, one step",
    "hass": "HASS: three aligned steps, regression and top-K distillation",
    "free_one": "EAGLE-1's head without the feature constraint, one step",
    "free_ttt": "EAGLE-1's head without the feature constraint, 4 steps",
    "top_ttt": "EAGLE-3's head on the high feature alone, 4 steps",
    "fused_ttt": "EAGLE-3: low, middle and high features, 4 steps",
    "fused_one": "EAGLE-3 without training-time test",
}
TREES = {
    "chain:4": "chain of 4",
    "default": "the recipe's tree, 5 nodes",
    "dynamic:4,4,16": "16 nodes, depth 4",
    "dynamic:8,10,60": "the papers' tree, 60 nodes",
}


def head_table(results: dict[str, Any]) -> str:
    """Of benchmarks/head.py: a row for each tree and temperature, before and after."""
    before, after = (results["heads"][name]["figures"] for name in ("before", "after"))
    rows = []
    for key in after:
        tree, temperature = key.split(", T=")
        old, new = ([found[key][name]["tokens_per_round"] for name in SETS] for found in (before, after))
        cells = [f"{b:.2f} → {a:.2f}" for b, a in zip(old, new, strict=True)]
        mean_old, mean_new = sum(old) / len(old), sum(new) / len(new)
        rows.append(
            [
                f"{TREES.get(tree, tree)}, T={temperature}",
                *cells,
                f"{mean_old:.2f} → {mean_new:.2f}",
                f"{mean_new / mean_old:.2f}×",
            ]
        )
    asked = results["asked"]
    note = f"first {asked['limit']} questions of each set, {asked['max_new_tokens']} tokens"
    return markdown(["tree", *SETS.values(), "mean", "ratio"], rows) + f"\nTokens per round; {note}.\n"


def ablation_table(results: dict[str, Any]) -> str:
    """Of benchmarks/ablation.py: a row for each training."""
    rows = []
    for name, label in RUNS.items():
        if (run := results["runs"].get(name)) is None:
            continue
        rows.append(
            [
                label,
                *_steps(run["acceptance"]),
                f"{run['tokens_per_round']:.2f}",
                f"{run['tokens_per_round_top']:.2f}",
            ]
        )
    some = next(iter(results["runs"].values()))
    head = ["training", "step 1", "step 2", "step 3", "step 4", "chain", "four wide"]
    updates = f"{results['updates']} updates of {some['tokens'] / some['updates']:.0f} answer tokens"
    what = f"Acceptance by step and tokens per round on {some['rows']} held-out rows"
    return markdown(head, rows) + f"\n{what} after {updates}.\n"


def _steps(acceptance: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in acceptance] + [""] * (4 - len(acceptance))
