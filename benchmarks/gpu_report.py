"""What was measured, in short: where it ran, whether goals are met, a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eagle_run.backends.environment import environment

BUSY, OVER_GRAPHS = 0.97, 1.05


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU and the versions. Names no host, user or path."""
    import transformers

    here: dict[str, Any] = {"transformers": transformers.__version__, **environment()}
    if device.type != "cuda":
        return {"name": "dry run", **here}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        **here,
    }


def speeds(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every measured batch, with the name of what was measured."""
    for name, section in results["sections"].items():
        if "trees" in section and "plain" in section:
            yield name, section
        for batch in section.get("speed", ()):
            yield f"{name} batch {batch['batch']}", batch


def _trees(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tree for _, batch in speeds(results) for tree in batch["trees"].values() if "round_ms" in tree]


def goals(results: Mapping[str, Any]) -> dict[str, Any]:
    """The worst figure for each goal. None where nothing was measured."""
    trees = _trees(results)
    sections = results["sections"].values()
    checks = [s.get("equality", s) for s in sections]
    checks = [check for check in checks if "faults" in check]
    captures = [s.get("sampling", s) for s in sections]
    grown = [s["captures_for_another_temperature"] for s in captures if "settings" in s]
    equal = [check["captured_equal"] for check in checks] + [tree["uncaptured_equal"] for tree in trees]
    return {
        "busy": {"goal": BUSY, "worst": min((tree["busy"] for tree in trees), default=None)},
        "round_over_graphs": {
            "goal": OVER_GRAPHS,
            "worst": max((tree["round_over_graphs"] for tree in trees), default=None),
        },
        "captured_equals_called": all(equal) if equal else None,
        "faults_against_plain": sum(check["faults"] for check in checks) if checks else None,
        "captures_for_another_temperature": max(grown, default=None),
    }


def table(results: Mapping[str, Any]) -> str:
    """Lines of text: each tree of each batch."""
    lines = [
        f"{'':32}{'plain':>8}{'round':>8}{'called':>8}{'busy':>7}{'/graphs':>9}{'/least':>8}  speed-up at τ"
    ]
    for name, batch in speeds(results):
        for tree, found in batch["trees"].items():
            label = f"{name} {tree}".replace(" batch ", " ×")
            if "round_ms" not in found:
                lines.append(f"{label:32}  {found['skipped']}")
                continue
            runs = "  ".join(
                f"{run['speedup']:.2f}× at {run['tokens_per_round']:.2f}" for run in found["runs"]
            )
            least = f"{1 / found['share_of_least']:.2f}" if "share_of_least" in found else "-"
            lines.append(
                f"{label:32}{found['plain_step_ms']:8.2f}{found['round_ms']:8.2f}"
                f"{found['uncaptured_round_ms']:8.2f}{found['busy']:7.1%}{found['round_over_graphs']:9.3f}"
                f"{least:>8}  {runs}"
            )
    lines.append("ms; /graphs: round over its graphs in a row; /least: verify over the hardware's least")
    for kind in ("skipped", "errors"):
        lines += [f"{kind}: {name}: {reason}" for name, reason in results[kind].items()]
    lines.append(", ".join(f"{name} {value}" for name, value in goals(results).items()))
    return "\n".join(lines)
