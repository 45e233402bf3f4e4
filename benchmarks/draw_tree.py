"""Draws the draft tree of a real round: docs/draft_tree.svg.

    python -m benchmarks.draw_tree --bundle bundles/smollm2-135m-eagle3

Decodes a prompt greedily and draws the round with the longest accepted path. Green is what the target
accepted, blue the bonus token; a node's second line is the target's probability of it after its parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

PROMPT = "Write a short story about a lighthouse keeper and her cat."
ACCEPTED, REFUSED, BONUS = "#2e7d32", "#90a4ae", "#1565c0"


@dataclass(frozen=True)
class Round:
    """What a round looked like: node i has a parent, a depth, text, and the target's probability of it."""

    before: str
    parents: list[int]
    depths: list[int]
    texts: list[str]
    probabilities: list[float]
    accepted: list[int]
    bonus: str


@click.command(help=__doc__)
@click.option("--bundle", default="bundles/smollm2-135m-eagle3", show_default=True)
@click.option("--tree", default="dynamic:4,3,12", show_default=True)
@click.option("--prompt", default=PROMPT)
@click.option("--rounds", default=40, show_default=True, help="Rounds to choose from.")
@click.option("--out", default="docs/draft_tree.svg", type=click.Path(path_type=Path))
def main(bundle: str, tree: str, prompt: str, rounds: int, out: Path) -> None:
    seen = decode(bundle, tree, prompt, rounds)
    draw(max(seen, key=lambda found: len(found.accepted)), out)
    click.echo(out)


def decode(bundle: str, tree: str, prompt: str, rounds: int) -> list[Round]:
    """The first `rounds` rounds of the answer to `prompt`."""
    from eagle_run.decoding.config import SpeculativeConfig
    from eagle_run.decoding.sampling import stack
    from eagle_run.decoding.tree_spec import parse_spec
    from eagle_run.engine.loading import load_engine
    from eagle_run.engine.prefill import kv_bucket, prefill
    from eagle_run.engine.round import run_round
    from eagle_run.params import SamplingParams

    engine = load_engine(bundle, device="cpu")
    runner, speculative = engine.runner, SpeculativeConfig(parse_spec(tree))
    state = runner.new_state(speculative.path_rows, stack([SamplingParams(temperature=0)]))
    tokens = engine.tokenizer.encode_prompt(prompt)
    prefill(runner, state, 0, tokens, chunk=engine.limits.prefill_chunk)
    seen: list[Round] = []
    for _ in range(rounds):
        kv = kv_bucket(len(tokens) + speculative.tree.cache_rows, runner.cache_rows)
        result = run_round(runner, state, speculative, kv=kv)
        path = result.path
        length = int(path.length[0])
        emitted = path.tokens[0, :length].tolist()
        accepted = path.nodes[0, :length].tolist()
        seen.append(
            describe(
                engine, result.plan, result.verified, accepted=accepted, tokens=tokens, bonus=emitted[-1]
            )
        )
        tokens += emitted
        if engine.bundle.manifest.stop_token_ids and emitted[-1] in engine.bundle.manifest.stop_token_ids:
            break
    return seen


def describe(
    engine: Any, plan: Any, forward: Any, *, accepted: list[int], tokens: list[int], bonus: int
) -> Round:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine.bundle.tokenizer_dir / "tokenizer.json"))
    p = forward.outputs["logits"].softmax(-1)[0]  # [N, V]
    parents = plan.parents[0].tolist()
    ids = plan.tokens[0].tolist()
    return Round(
        before=tokenizer.decode(tokens[-9:-1]),
        parents=parents,
        depths=plan.depth[0].tolist(),
        texts=[tokenizer.decode([token]) for token in ids],
        probabilities=[1.0] + [float(p[parents[i], ids[i]]) for i in range(1, len(ids))],
        accepted=accepted,
        bonus=tokenizer.decode([bonus]),
    )


def draw(found: Round, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "draft tree"  # the same tree gives the same file
    from matplotlib import pyplot as plt

    place = layout(found)
    lines = 1 - min(y for _, y in place.values())
    figure, axes = plt.subplots(figsize=(1.6 * (max(found.depths) + 2), 0.6 * lines + 0.6))
    for node, parent in enumerate(found.parents):
        colour = ACCEPTED if node in found.accepted else REFUSED
        if node:
            (x0, y0), (x1, y1) = place[parent], place[node]
            axes.plot([x0, x1], [y0, y1], color=colour, zorder=1)
        text = found.texts[node].strip() or "␠"
        label(axes, place[node], f"{text}\np = {found.probabilities[node]:.2f}" if node else text, colour)
    last = place[found.accepted[-1]]
    bonus = (max(found.depths) + 1, last[1])
    axes.plot([last[0], bonus[0]], [last[1], bonus[1]], color=BONUS, linestyle=":", zorder=1)
    label(axes, bonus, f"{found.bonus.strip() or '␠'}\nbonus token", BONUS)
    axes.set_title(f"… {found.before.strip()}", loc="left", fontsize=10, family="monospace", pad=18)
    axes.axis("off")
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def label(axes: Any, where: tuple[float, float], text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour, "linewidth": 1.6}
    axes.text(*where, text, ha="center", va="center", fontsize=9, color=colour, bbox=box, zorder=2)


def layout(found: Round) -> dict[int, tuple[float, float]]:
    """(depth, line) of each node: a line for each leaf, top to bottom; parents sit at their first child."""
    place: dict[int, tuple[float, float]] = {}
    line = 0.0

    def put(node: int) -> None:
        nonlocal line
        children = [i for i, parent in enumerate(found.parents) if parent == node and i != node]
        for child in children:
            put(child)
        if children:
            place[node] = (found.depths[node], place[children[0]][1])
        else:
            place[node] = (found.depths[node], -line)
            line += 1

    put(0)
    return place


if __name__ == "__main__":
    main()
