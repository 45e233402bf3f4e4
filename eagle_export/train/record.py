"""What a run says of itself: points of its curve, lines for the user, training.json, and a picture."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export.checkpoints.whereabouts import told
from eagle_export.files import whole_file
from eagle_export.train.evaluate import Validation
from eagle_export.train.trainer import Trainer, Update

if TYPE_CHECKING:
    from eagle_export.train.prepare import Prepared, TrainRequest


def point(recent: Sequence[Update]) -> dict[str, Any]:
    """Means over some updates, as a point of the curve."""
    steps = range(len(recent[0].acceptance))
    return {
        "update": recent[-1].update,
        "loss": _mean([update.loss for update in recent]),
        "lr": recent[-1].lr,
        "acceptance": [_mean([update.acceptance[step] for update in recent]) for step in steps],
        "tokens_per_second": _speed(recent),
    }


def progress_text(recent: Sequence[Update], total: int) -> str:
    """For the bar: where the run stands and how long it will take."""
    now = recent[-1].update
    left = (total - now) * _mean([update.seconds for update in recent])
    return (
        f"{now}/{total}  loss {_mean([update.loss for update in recent]):.3f}  "
        f"acceptance {_mean([update.acceptance[0] for update in recent]):.3f}  "
        f"{_speed(recent):,.0f} tokens/s  {_clock(left)} left"
    )


def validation_text(update: int, validation: Validation, recent: Sequence[Update]) -> str:
    """A line of the log."""
    steps = " ".join(f"{share:.3f}" for share in validation.acceptance)
    text = (
        f"update {update:>6}  held out: acceptance {steps}  tokens per round "
        f"{validation.tokens_per_round:.3f} (chain)  {validation.tokens_per_round_top:.3f} (wide)"
    )
    if not recent:
        return text
    now = point(recent)
    return (
        f"{text}  training: loss {now['loss']:.3f}, acceptance {now['acceptance'][0]:.3f}, "
        f"{now['tokens_per_second']:,.0f} tokens/s"
    )


def facts(request: TrainRequest, prepared: Prepared, trainer: Trainer, *, held_out: int) -> dict[str, Any]:
    """training.json: where the head comes from and how good it was on the way."""
    state, target, kept = trainer.run_state, prepared.target, prepared.vocabulary
    checked = [entry for entry in state.history if "validation" in entry]
    best = max(checked, key=lambda entry: entry["validation"]["tokens_per_round"], default=None)
    return {
        "head": request.out.resolve().name,
        "target": {"name": target.name, "source": target.source, "sha256": target.sha256},
        "data": {
            "sha256": prepared.samples.sha256,
            "conversations": len(prepared.samples),
            "tokens": prepared.samples.token_count,
            "held_out": held_out,
        },
        "settings": trainer.settings.as_dict(),
        "init": told(request.init),
        "feature_layers": list(prepared.spec.feature_layers),
        "draft_vocab": {"size": len(kept.ids), "coverage": kept.coverage},
        "updates": state.update,
        "total_updates": trainer.total,
        "tokens": state.tokens,
        "best": best,
        "last": checked[-1] if checked else None,
        "history": state.history,
    }


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _speed(recent: Sequence[Update]) -> float:
    return sum(update.tokens for update in recent) / sum(update.seconds for update in recent)


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
