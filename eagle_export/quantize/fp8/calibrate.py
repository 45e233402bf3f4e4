"""Calibration: decodes prompts with the eager modules and notes how large every linear layer's input gets.

The decoding is the runtime's own loop, round by round: the target sees prompts, its answers and the trees
drafted on the way; the draft sees target features and, below them, its own hidden states fed back, as it will
when the bundle is used. Rows that carry nothing (the tail of a half-filled prime) do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle_export.checkpoints.fp8_scales import LARGEST, Scales
from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    from eagle_export.reference.modules import Modules
    from eagle_run.decoding.tree import TreeShape
    from eagle_run.engine.model_runner import BatchState, ModelRunner
    from eagle_run.tokenizer import Tokenizer

PROMPT_COUNT, TOKENS = 12, 24  # by default: enough that more prompts no longer move the result


def encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Each prompt as one user turn, as a chat would send it; bare where the model has no chat template."""
    return [tokenizer.encode_prompt(prompt, raw=tokenizer.chat_template is None) for prompt in prompts]


def calibrate(
    modules: Modules,
    prompts: Sequence[Sequence[int]],
    *,
    shape: TreeShape | None = None,
    tokens: int = TOKENS,
    stop_tokens: Sequence[int] = (),
    target_sha256: str | None = None,
    head_sha256: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Scales:
    """Scales (amax / 448) of every linear layer's input over `prompts` and `tokens` new tokens of each.

    prompts: token ids, template included (`encode`). shape: the tree to decode with; plain decoding where the
    modules have no head. on_progress(done, all) is told after each prompt. The modules are run in the dtype
    they have. Raises EagleError when activations are not finite, UsageError without prompts.
    """
    with recording(modules) as recorder:
        answers = decode(
            modules,
            prompts,
            shape=shape,
            tokens=tokens,
            stop_tokens=stop_tokens,
            recorder=recorder,
            on_progress=on_progress,
        )
    inputs = {
        graph: {name: _scale(value, name) for name, value in sizes.items()}
        for graph, sizes in recorder.amax.items()
    }
    peaks = {graph: float(value) for graph, value in recorder.peaks.items()}
    seen = sum(map(len, answers)) + sum(map(len, prompts))
    return Scales(inputs, peaks, seen, target_sha256=target_sha256, head_sha256=head_sha256)


def decode(
    modules: Modules,
    prompts: Sequence[Sequence[int]],
    *,
    shape: TreeShape | None,
    tokens: int,
    stop_tokens: Sequence[int] = (),
    recorder: Recorder | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Greedy answers of about `tokens` tokens, prompt by prompt, with the runtime's own rounds.

    Each prompt is prefilled in one forward of exactly its length, so there are no padded rows.
    """
    from eagle_export.reference.modules import eager_graphs
    from eagle_run.decoding.tree import TreeShape
    from eagle_run.engine.model_runner import ModelRunner

    if not prompts or not all(prompts):
        raise UsageError("calibration needs prompts, and none of them empty")
    if shape is None or modules.draft is None:
        shape = TreeShape.plain()
    longest = max(map(len, prompts))
    rows = longest + tokens + 2 * (shape.depth + 1) + max(shape.cache_rows, longest)
    runner = ModelRunner(eager_graphs(modules, rows), batch=1, draft_to_target=modules.draft_to_target)
    answers = []
    for done, prompt in enumerate(prompts, start=1):
        stop = frozenset(stop_tokens)
        answers.append(_answer(runner, prompt, shape, tokens=tokens, stop=stop, recorder=recorder))
        if on_progress:
            on_progress(done, len(prompts))
    return answers


def _answer(
    runner: ModelRunner,
    prompt: Sequence[int],
    shape: TreeShape,
    *,
    tokens: int,
    stop: frozenset[int],
    recorder: Recorder | None,
) -> list[int]:
    from eagle_run.decoding.config import SpeculativeConfig
    from eagle_run.decoding.sampling import stack
    from eagle_run.engine.prefill import kv_bucket, prefill
    from eagle_run.engine.round import run_round
    from eagle_run.params import SamplingParams

    speculative = SpeculativeConfig(shape)
    greedy = stack([SamplingParams(temperature=0)], runner.device)
    state = runner.new_state(speculative.path_rows, greedy)
    if recorder is not None:
        recorder.state = None
    prefill(runner, state, 0, prompt, chunk=max(1, len(prompt) - 1))
    if recorder is not None:
        recorder.state = state
    answer: list[int] = []
    while len(answer) < tokens and not stop.intersection(answer):
        kv = kv_bucket(len(prompt) - 1 + len(answer) + shape.cache_rows, runner.cache_rows)
        path = run_round(runner, state, speculative, kv=kv).path
        answer += path.tokens[0, : int(path.length[0])].tolist()
    return answer


class Recorder:
    """Largest magnitudes, by graph: of each linear layer's input, and of what passes between layers.

    `state` is the decoder's during rounds and None during prefill, where every row counts.
    """

    def __init__(self) -> None:
        self.amax: dict[str, dict[str, Tensor]] = {}
        self.peaks: dict[str, Tensor] = {}
        self.state: BatchState | None = None
        self._rows: Tensor | None = None  # bool [1, T]: the rows that count in the draft's present forward

    def see(self, graph: str, name: str, x: Tensor) -> None:
        """x [B, T, K]: the input of a linear layer."""
        sizes = self.amax.setdefault(graph, {})
        sizes[name] = _larger(sizes.get(name), self._counted(graph, x))

    def see_stream(self, graph: str, x: Tensor) -> None:
        """x [B, T, H]: what one layer hands to the next."""
        self.peaks[graph] = _larger(self.peaks.get(graph), self._counted(graph, x))

    def start(self, graph: str, rows: int, logit_rows: int) -> None:
        """A forward of `graph` begins. Of a prime only the pending pairs count; the rows behind are stale."""
        prime = graph == "fuse" or (graph == "draft" and logit_rows == 1 and rows > 1)
        self._rows = None
        if self.state is not None and prime:
            count = self.state.pending_count.clamp(min=1)[:, None]  # [1, 1]
            self._rows = torch.arange(rows, device=count.device) < count

    def _counted(self, graph: str, x: Tensor) -> Tensor:
        if graph == "target" or self._rows is None or x.shape[1] != self._rows.shape[1]:
            return x
        return x[self._rows]


@contextmanager
def recording(modules: Modules) -> Iterator[Recorder]:
    """While this lasts, forwards of the modules are recorded; the modules are left as they were."""
    recorder = Recorder()
    handles = [
        handle for graph, module in named_graphs(modules).items() for handle in _hook(recorder, graph, module)
    ]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def named_graphs(modules: Modules) -> dict[str, nn.Module]:
    """The module behind each graph, such that its parameters are named as in the checkpoint."""
    parts = {"target": modules.model, "fuse": modules.fuse, "draft": modules.draft}
    return {graph: module for graph, module in parts.items() if module is not None}


def named_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by its name in the checkpoint, without ".weight"."""
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def _hook(recorder: Recorder, graph: str, module: nn.Module) -> Iterator[Any]:
    for name, linear in named_linears(module).items():

        def see(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            recorder.see(graph, name, args[0])

        yield linear.register_forward_pre_hook(see)
    if graph == "fuse":
        yield module.register_forward_pre_hook(lambda _, args: recorder.start(graph, args[0].shape[1], 0))
    if graph == "draft":
        yield module.register_forward_pre_hook(
            lambda _, args: recorder.start(graph, args[0].shape[1], args[5].shape[1])
        )
    for layer in _layers(graph, module):
        yield layer.register_forward_hook(
            lambda _, __, out: recorder.see_stream(graph, out if isinstance(out, Tensor) else out[0])
        )


def _layers(graph: str, module: Any) -> list[nn.Module]:
    if graph == "target":
        return list(module.model.layers)
    from eagle_export.models.head import Layer

    return [part for part in module.modules() if isinstance(part, Layer)]


def _larger(before: Tensor | None, x: Tensor) -> Tensor:
    """The larger of `before` and max |x|, as a tensor: nothing is read back while decoding; NaN stays NaN."""
    size = x.detach().abs().amax().float()
    return size if before is None else torch.maximum(before, size)


def _scale(amax: Tensor, name: str) -> float:
    value = float(amax)
    if not value < float("inf"):
        raise EagleError(
            f"calibration met values that are not finite numbers at the input of {name}",
            hint="calibrate in bf16 or fp32",
        )
    # Also for an input that was always zero; the division is in float32, the type that the graph holds.
    return float(torch.tensor(max(value, 1e-12)) / LARGEST)
