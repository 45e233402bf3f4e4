"""The course of a training run: training.json, and as a picture."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_export.files import whole_file


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes `data` under another name and renames it."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, history: Sequence[Mapping[str, Any]]) -> bool:
    """A picture of loss, acceptance by step and tokens per round over updates. False without matplotlib."""
    # It warns where HOME cannot be written, and while it looks for fonts.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    trained = [entry for entry in history if "loss" in entry]
    checked = [entry for entry in history if "validation" in entry]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, acceptance, rounds = figure.subplots(1, 3)
    loss.plot([e["update"] for e in trained], [e["loss"] for e in trained], color="C0")
    loss.set_title("training loss")
    updates = [entry["update"] for entry in checked]
    for step in range(len(checked[0]["validation"]["acceptance"]) if checked else 0):
        shares = [entry["validation"]["acceptance"][step] for entry in checked]
        acceptance.plot(updates, shares, marker=".", label=f"step {step + 1}")
    acceptance.set_title("held-out acceptance")
    for key, name in (("tokens_per_round", "chain"), ("tokens_per_round_top", "wide tree, at most")):
        rounds.plot(updates, [entry["validation"][key] for entry in checked], marker=".", label=name)
    rounds.set_title("held-out tokens per round")
    for axes in (loss, acceptance, rounds):
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="x-small")
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    return True
