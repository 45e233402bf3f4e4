"""`eagle-export verify`: is a bundle what its source weights are, does it lose anything, does its head help?

(a) every graph against the eager reference; (b) tokens of tree and chain against plain decoding, and plain
decoding against Transformers; (c) what the head brings, on a few prompts, and whether another reading of its
checkpoint would bring more; (d) below float32, what the precision costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from eagle_export.progress import Progress
from eagle_export.reference.modules import Modules, eager_graphs, reference_of
from eagle_export.verify.accuracy import Backend, choose_requests, measure
from eagle_export.verify.checks import Check, check_acceptance, check_accuracy
from eagle_export.verify.head_check import Measured, check_head
from eagle_export.verify.parity import LIMITS, compare, row_dependence
from eagle_export.verify.sources import (
    base_precision,
    fp8_weights,
    onnx_precision,
    wide_graphs,
    widen_modules,
)
from eagle_run.backends.environment import thread_count
from eagle_run.bench.mismatch import TIE, TIES, Mismatch, find_mismatch
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.decoding.config import PLAIN, SpeculativeConfig
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import assemble_engine, load_engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.offline import OfflineRequest, run_offline
from eagle_run.metrics import Metrics, total_metrics
from eagle_run.params import SamplingParams
from eagle_run.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.console import RenderableType

_DECODED, _MEASURED = 4, 12  # of our own prompts, where the user does not say
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
_OTHER_CODE = {"fp32": TIE, "fp16": 0.25, "bf16": 1.0}  # Transformers rounds in other places


@dataclass(frozen=True)
class Verification:
    """All checks of a bundle, the acceptance profile of its head, and how it drafts when read otherwise.

    The profile is None, and there are no readings, without a head.
    """

    bundle: str
    precision: str
    checks: tuple[Check, ...]
    acceptance: dict[str, Any] | None
    readings: tuple[Measured, ...] = ()

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
            "readings": [reading.as_dict() for reading in self.readings],
        }


def verify_bundle(
    path: Path,
    progress: Progress,
    *,
    prompts: Path | None = None,
    limit: int | None = None,
    max_new_tokens: int = 48,
    target: str | None = None,
    head: str | None = None,
    threads: int = 0,
) -> Verification:
    """Runs every check on the bundle at `path` with ONNX Runtime on the CPU.

    bfloat16 is run by the modules that were exported. `prompts` is a file of questions (default: our own),
    `limit` takes the first ones; `target` and `head` say where the source weights are, as for a build. Raises
    EagleError when bundle, prompts or weights cannot be read, and for a bundle of engines alone, UsageError
    for more threads than cores; what is wrong with a readable bundle is in the result.
    """
    thread_count(threads)
    with progress.step("open the bundle"):
        bundle = load_bundle(path)
        precision = onnx_precision(bundle)
        tokenizer, limits = Tokenizer.load(bundle.tokenizer_dir), bundle.manifest.limits
    requests = choose_requests(
        tokenizer,
        bundle.manifest.stop_token_ids,
        max_seq_len=limits.max_seq_len,
        questions=prompts,
        limit=limit,
        max_tokens=max_new_tokens,
    )

    own = prompts is None and limit is None
    decoded, measured = (requests[:_DECODED], requests[:_MEASURED]) if own else (requests, requests)

    def source(kind: str) -> Modules:
        with progress.step(f"load the source weights in {kind}"):
            return reference_of(bundle.manifest, precision=kind, target=target, head=head)

    modules = source(base_precision(bundle))
    with TemporaryDirectory() as folder:
        engine = _open(bundle, modules, Path(folder) / "run", threads)
        with progress.step("compare the graphs"):
            checks = check_graphs(engine, modules, source, Path(folder) / "wide")
        answers = [_Answers(engine, request) for request in progress.track(decoded, "decode the prompts")]
        if precision != "fp8":  # rounded rows are another function; `check_accuracy` tells how far off
            with progress.step("compare with Transformers"):
                checks += [_check_transformers(modules, answers, precision)]
        acceptance: dict[str, Any] | None = None
        readings: list[Measured] = []
        exact = modules if precision == "fp32" else source("fp32")
        if engine.default_tree is not None:
            checks += _check_tokens(answers, precision)
            acceptance = profile(engine.default_tree, answers)
            checks.append(check_acceptance(acceptance))
            with progress.step("read the head in other ways"):
                answered = [(answer.request.prompt_token_ids, answer.plain) for answer in answers]
                speculative = SpeculativeConfig(engine.default_tree)
                answered += [
                    (request.prompt_token_ids, _tokens(engine, request, speculative))
                    for request in measured[len(decoded) :]
                ]
                check, readings = check_head(exact, answered)
            checks.append(check)
        if precision != "fp32":
            how: Backend = "eager" if precision == "bf16" else "onnxruntime"
            graphs = engine.runner.graphs
            tree = engine.default_tree
            info = measure(graphs, exact, measured, progress, limits=limits, tree=tree, backend=how)
            checks += check_accuracy(info, precision)
    return Verification(str(path), precision, tuple(checks), acceptance, tuple(readings))


def _open(bundle: Bundle, modules: Modules, folder: Path, threads: int) -> Engine:
    """The bundle on this CPU: its ONNX graphs, or what stands for them where they are in bfloat16.

    Then FP8 graphs are run with float32 in its place, and others by `modules`.
    """
    if base_precision(bundle) != "bf16":
        return load_engine(bundle.path, device="cpu", threads=threads)
    graphs = eager_graphs(modules, bundle.manifest.limits.cache_rows)
    if onnx_precision(bundle) == "fp8":
        graphs = wide_graphs(bundle, folder, fp8_rows=True, threads=threads)
    runner = ModelRunner(
        graphs, batch=1, draft_to_target=modules.draft_to_target, precision=onnx_precision(bundle)
    )
    return assemble_engine(bundle, runner, backend="eager", threads=threads)


def check_graphs(
    engine: Engine, modules: Modules, source: Callable[[str], Modules], folder: Path
) -> list[Check]:
    """Parity of every graph with the source weights, and independence of the target's rows.

    All graphs are compared in float32 (see sources.py); `source` loads the weights for that, and
    `folder` takes the graphs.
    """
    bundle, rows = engine.bundle, engine.runner.cache_rows
    assert bundle is not None  # it was assembled from one
    base, precision = base_precision(bundle), onnx_precision(bundle)
    graphs, detail = engine.runner.graphs, "largest difference from the source weights"
    with ExitStack() as stack:
        limit = LIMITS["fp32"]
        if precision != "fp32":
            graphs, detail = wide_graphs(bundle, folder, threads=engine.threads), f"{detail}, in float32"
            modules = widen_modules(source(base))
            stack.enter_context(fp8_weights(modules, bundle))
        differences = compare(graphs, eager_graphs(modules, rows))
    found = [(f"{difference.graph}: {difference.tensor}", difference.value) for difference in differences]
    checks = [Check(name, "ok" if v <= limit else "fail", detail, v, limit) for name, v in found]
    limit, moved = LIMITS[base], row_dependence(engine.runner.graphs["target"])
    detail = "most that a row's logits move with the rows beside it"
    checks.append(Check("target: rows", "ok" if moved <= limit else "fail", detail, moved, limit))
    return checks


class _Answers:
    """What the bundle answers to one request, decoded in every way that must agree."""

    def __init__(self, engine: Engine, request: OfflineRequest) -> None:
        self.request = request
        self.metrics = Metrics()  # of the tree at temperature 0
        self.plain = _tokens(engine, request, PLAIN)
        self.faults: list[tuple[str, Mismatch]] = []
        tree = engine.default_tree
        if tree is None:
            return
        run = run_offline(engine, [request], SpeculativeConfig(tree))
        self.metrics = run.metrics
        self._compare(engine, "tree", request, self.plain, run.token_ids[0])
        chain = SpeculativeConfig(TreeShape.chain(max(tree.depth, 2)))
        self._compare(engine, "chain", request, self.plain, _tokens(engine, request, chain))
        seeded = replace(SAMPLED, max_tokens=request.params.max_tokens)
        seeded = replace(seeded, stop_token_ids=request.params.stop_token_ids, detokenize=False)
        sampled = replace(request, params=seeded)
        plain, other = (_tokens(engine, sampled, each) for each in (PLAIN, SpeculativeConfig(tree)))
        self._compare(engine, "sampled", sampled, plain, other)

    def _compare(
        self,
        engine: Engine,
        name: str,
        request: OfflineRequest,
        plain: Sequence[int],
        other: Sequence[int],
    ) -> None:
        fault = find_mismatch(engine, request, plain, other)
        if fault is not None:
            self.faults.append((name, fault))


def _tokens(engine: Engine, request: OfflineRequest, speculative: SpeculativeConfig) -> tuple[int, ...]:
    return run_offline(engine, [request], speculative).token_ids[0]


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
        limit = TIES[precision][name == "sampled"]
        if precision == "fp8" and name == "chain":  # its rows lie as in plain decoding: equal to the bit
            limit = TIE
        bad = [f for f in faults if f.gap is None or f.gap > limit]
        detail = f"{len(answers) - len(faults)} of {len(answers)} answers equal plain decoding"
        if len(faults) > len(bad):
            detail += f"; {len(faults) - len(bad)} differ from a tie on (within {limit:g})"
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
        prompt = answer.request.prompt_token_ids
        ids = torch.tensor([[*prompt, *answer.plain]])
        with torch.inference_mode():
            logits = modules.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()  # [answer, V]
        chosen = logits.gather(1, torch.tensor(answer.plain)[:, None])[:, 0]
        gaps = logits.amax(1) - chosen
        worst = max(worst, float(gaps.max()))
        ties += int((gaps > 0).sum())
        tokens += len(answer.plain)
    limit = _OTHER_CODE[precision]
    detail = f"{tokens - ties} of {tokens} plain tokens are the greedy choice of Transformers"
    if ties and worst <= limit:
        detail += f"; the other {ties} are ties"
    return Check("tokens at T=0: Transformers", "ok" if worst <= limit else "fail", detail, worst, limit)


def profile(tree: TreeShape, answers: Sequence[_Answers]) -> dict[str, Any]:
    """Tokens per round and acceptance by depth at temperature 0, and what knowing no context would accept.

    `chance` is the share of the answers' tokens that are among their top_k most common: what a head would
    have accepted at depth 1 that always proposes these.
    """
    total = total_metrics(answer.metrics for answer in answers)
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
