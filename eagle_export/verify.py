"""`eagle-export verify`: is a bundle what its source weights are, does it lose anything, does its head help?

(a) every graph against the eager reference; (b) tokens of tree and chain against plain decoding, and plain
decoding against Transformers; (c) what the head brings, on a few prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from eagle_export.parity import LIMITS, compare, row_dependence
from eagle_export.progress import Report
from eagle_export.reference import Modules, eager_graphs, reference_of
from eagle_run.bench_result import merge
from eagle_run.dataset import read_questions
from eagle_run.engine import Engine, open_engine
from eagle_run.errors import EagleError
from eagle_run.loop import Request, Stats
from eagle_run.mismatch import TIE, find_mismatch
from eagle_run.sampling import SamplingSettings
from eagle_run.tree import TreeShape

if TYPE_CHECKING:
    from rich.console import RenderableType

PROMPTS = (
    "Write a short note to a neighbour whose dog keeps digging up your flower bed.",
    "A train leaves at 14:35 and arrives at 17:10. How long is the journey? Show your steps.",
    "Write a Python function that returns the second largest number of a list.",
    "List five things to check before a long bicycle tour, one line each.",
)
SAMPLED = SamplingSettings(temperature=0.8, top_p=0.95, seed=7)
# Where two forwards of another shape may choose differently, by precision; beyond it is a fault.
_TIES = {"fp32": TIE, "fp16": LIMITS["fp16"], "bf16": LIMITS["bf16"]}


@dataclass(frozen=True)
class Check:
    """One question and its answer. `value` is what was measured, `limit` the most (or least) it may be."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Verification:
    """All checks of a bundle, and the acceptance profile of its head (None without one)."""

    bundle: str
    precision: str
    checks: tuple[Check, ...]
    acceptance: dict[str, Any] | None

    @property
    def failures(self) -> int:
        return sum(check.status == "fail" for check in self.checks)

    @property
    def passed(self) -> bool:
        """Nothing failed; a warning is no failure."""
        return self.failures == 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "precision": self.precision,
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "acceptance": self.acceptance,
        }


def verify_bundle(
    path: Path,
    report: Report,
    *,
    prompts: Path | None = None,
    limit: int | None = None,
    max_new_tokens: int = 48,
    target: str | None = None,
    head: str | None = None,
    threads: int = 0,
) -> Verification:
    """Runs every check on the bundle at `path` with ONNX Runtime on the CPU.

    `prompts` is a file of questions (default: PROMPTS), `limit` takes the first ones; `target` and `head` say
    where the source weights are, as for a build. Raises EagleError when bundle, prompts or weights cannot be
    read; what is wrong with a readable bundle is in the result.
    """
    texts = (
        [q.turns[0] for q in read_questions(prompts, limit=limit or 0)] if prompts else list(PROMPTS[:limit])
    )
    with report.step("open the bundle"):
        engine = open_engine(path, threads=threads)
    with report.step("load the source weights"):
        modules = reference_of(engine.bundle.manifest, target=target, head=head)
    with report.step("compare the graphs"):
        checks = check_graphs(engine, modules)
    requests = [
        engine.request(text, max_new_tokens=max_new_tokens, raw=engine.text.chat_template is None)
        for text in texts
    ]
    if prompts is None:
        requests = _fitting(engine, requests)
    answers = [_Answers(engine, request) for request in report.track(requests, "decode the prompts")]
    with report.step("compare with Transformers"):
        checks += [_check_transformers(modules, answers, engine.precision)]
    acceptance = None
    if engine.tree is not None:
        checks += _check_tokens(answers, engine.precision)
        acceptance = profile(engine.tree, answers)
        checks.append(check_acceptance(acceptance))
    return Verification(str(path), engine.precision, tuple(checks), acceptance)


def _fitting(engine: Engine, requests: list[Request]) -> list[Request]:
    """Those of our own prompts that a short context has room for."""
    most = engine.decoder.max_seq_len
    if fitting := [request for request in requests if len(request.prompt) < most]:
        return fitting
    raise EagleError(
        f"the bundle's context of {most} tokens is too short for the built-in prompts",
        hint="give shorter ones with --prompts",
    )


def check_graphs(engine: Engine, modules: Modules) -> list[Check]:
    """Parity of every graph with the reference, and independence of the target's rows."""
    graphs, limit = engine.decoder.session.graphs, LIMITS[engine.precision]
    reference = eager_graphs(modules, engine.decoder.session.cache_rows)
    checks = []
    for difference in compare(graphs, reference):
        name, value = f"{difference.graph}: {difference.tensor}", difference.value
        status: Literal["ok", "fail"] = "ok" if value <= limit else "fail"
        checks.append(Check(name, status, "largest difference from the source weights", value, limit))
    moved = row_dependence(graphs["target"])
    detail = "most that a row's logits move with the rows beside it"
    checks.append(Check("target: rows", "ok" if moved <= limit else "fail", detail, moved, limit))
    return checks


class _Answers:
    """What the bundle answers to one request, decoded in every way that must agree."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.stats = Stats()  # of the tree at temperature 0
        self.plain = engine.decode([request], TreeShape.plain()).tokens[0]
        self.faults: list[tuple[str, Any]] = []
        if engine.tree is None:
            return
        sampled = replace(request, sampling=SAMPLED)
        plain_sampled = engine.decode([sampled], TreeShape.plain()).tokens[0]
        chain = TreeShape.chain(max(engine.tree.depth, 2))
        decoded = engine.decode([request], engine.tree)
        self.stats = decoded.stats
        self._compare(engine, "tree", request, self.plain, decoded.tokens[0])
        self._compare(engine, "chain", request, self.plain, engine.decode([request], chain).tokens[0])
        tree_sampled = engine.decode([sampled], engine.tree).tokens[0]
        self._compare(engine, "sampled", sampled, plain_sampled, tree_sampled)

    def _compare(
        self, engine: Engine, name: str, request: Request, plain: list[int], other: list[int]
    ) -> None:
        chunk = engine.decoder.chunk
        fault = find_mismatch(engine.decoder.session, request, plain, other, chunk=chunk)
        if fault is not None:
            self.faults.append((name, fault))


def _check_tokens(answers: Sequence[_Answers], precision: str) -> list[Check]:
    """Tree and chain at temperature 0, and the tree with a seed, against plain decoding."""
    told = {
        "tree": "tokens at T=0: tree",
        "chain": "tokens at T=0: chain",
        "sampled": f"tokens at T={SAMPLED.temperature:g} with a seed: tree",
    }
    checks = []
    for name, title in told.items():
        faults = [fault for answer in answers for kind, fault in answer.faults if kind == name]
        bad = [f for f in faults if f.gap is None or f.gap > _TIES[precision]]
        detail = f"{len(answers) - len(faults)} of {len(answers)} answers equal plain decoding"
        if len(faults) > len(bad):
            detail += f"; {len(faults) - len(bad)} differ from a tie on (within {_TIES[precision]:g})"
        if bad:
            detail += f"; first difference at token {bad[0].position}: {bad[0].plain} or {bad[0].speculative}"
        checks.append(Check(title, "fail" if bad else "ok", detail))
    return checks


def _check_transformers(modules: Modules, answers: Sequence[_Answers], precision: str) -> Check:
    """Each token of a plain answer must be the argmax of Transformers' own forward over what precedes it.

    If all are, its greedy decoding gives the same answer, token by token; one forward checks them all.
    """
    worst, ties, tokens = 0.0, 0, 0
    for answer in answers:
        prompt = answer.request.prompt
        ids = torch.tensor([[*prompt, *answer.plain]])
        with torch.inference_mode():
            logits = modules.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()  # [answer, V]
        chosen = logits.gather(1, torch.tensor(answer.plain)[:, None])[:, 0]
        gaps = logits.amax(1) - chosen
        worst = max(worst, float(gaps.max()))
        ties += int((gaps > 0).sum())
        tokens += len(answer.plain)
    limit = _TIES[precision]
    detail = f"{tokens - ties} of {tokens} plain tokens are the greedy choice of Transformers"
    if ties and worst <= limit:
        detail += f"; the other {ties} are ties"
    return Check("tokens at T=0: Transformers", "ok" if worst <= limit else "fail", detail, worst, limit)


def profile(tree: TreeShape, answers: Sequence[_Answers]) -> dict[str, Any]:
    """Tokens per round and acceptance by depth at temperature 0, and what knowing no context would accept.

    `chance` is the share of the answers' tokens that are among their top_k most common: what a head would
    have accepted at depth 1 that always proposes these.
    """
    total = merge([answer.stats for answer in answers])
    counts = Counter(token for answer in answers for token in answer.plain)
    common = sum(count for _, count in counts.most_common(tree.top_k))
    return {
        "tree": tree.as_dict(),
        "prompts": len(answers),
        "tokens": sum(counts.values()),
        "tokens_per_round": round(total.tokens_per_round, 3),
        "acceptance_by_depth": [round(share, 3) for share in total.acceptance_by_depth],
        "chance": round(common / max(sum(counts.values()), 1), 3),
    }


def check_acceptance(acceptance: dict[str, Any]) -> Check:
    """Warns when the head accepts no more than a head that knows nothing of the text would."""
    by_depth = acceptance["acceptance_by_depth"]
    first = by_depth[0] if by_depth else 0.0
    shares = " ".join(f"{share:.2f}" for share in by_depth) or "none"
    detail = f"{acceptance['tokens_per_round']:.2f} tokens per round; accepted by depth: {shares}"
    if first > acceptance["chance"]:
        return Check("acceptance", "ok", detail, first, acceptance["chance"])
    detail += (
        "; no more than chance: the head may be of another target (or of another fine-tune of it), its layer "
        "ids or rope base may be wrong, or it is untrained"
    )
    return Check("acceptance", "warn", detail, first, acceptance["chance"])


def render(result: Verification) -> RenderableType:
    """The checks as a table."""
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(title=f"{result.bundle} ({result.precision})", title_justify="left", box=None)
    for column in ("check", "", "measured", "limit", "found"):
        table.add_column(
            column, overflow="fold", justify="right" if column in ("measured", "limit") else "left"
        )
    for check in result.checks:
        numbers = ["" if number is None else f"{number:.2g}" for number in (check.value, check.limit)]
        table.add_row(check.name, Text(check.status, style=style[check.status]), *numbers, check.detail)
    return table
