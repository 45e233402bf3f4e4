"""Which linear layers spoil FP8? Each product is quantised alone and the target's distribution compared.

What a product costs is the mean KL(unquantised || this product in FP8) of the next token, over answers that
are fed as they are. Costs of single products are small and add up roughly, so the ranking says which layers
to keep in 16 bit first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_export.checkpoints.fp8_scales import Scales, starred
from eagle_export.quantize.fp8.calibrate import decode
from eagle_export.quantize.fp8.fake import fake_quantized, grouping
from eagle_run.errors import UsageError

if TYPE_CHECKING:
    from eagle_export.reference.modules import Modules

PROMPT_COUNT, TOKENS = 6, 32  # by default: some hundred positions


@dataclass(frozen=True)
class Cost:
    """What one product loses in FP8: mean KL in nats and the share of positions whose best token changes.

    layers: the linear layers of the product. pattern: what `choose` takes to keep it in 16 bit. share: of all
    quantised weights.
    """

    layers: tuple[str, ...]
    kl: float
    changed: float
    share: float

    @property
    def pattern(self) -> str:
        return self.layers[0]  # keeping one layer keeps its product


def sensitivity(
    modules: Modules,
    scales: Scales,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = TOKENS,
    stop_tokens: Sequence[int] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Cost]:
    """The target's products, the most expensive first, over greedy answers of `tokens` tokens to `prompts`.

    scales: of the layers to look at (`choose`). One forward per product over all answers side by side, in the
    modules' own dtype; the weights are left as they were. Raises UsageError where nothing is to be looked at.
    """
    inputs = scales.inputs.get("target", {})
    answers = decode(modules, prompts, shape=None, tokens=tokens, stop_tokens=stop_tokens)
    answered = _Answers(modules.model, prompts, answers)
    with grouping(modules.model) as groups:
        exact = answered.log_probabilities()
    chosen = [group for group in groups if group and all(name in inputs for name in group)]
    if not chosen:
        raise UsageError("no product of the target is quantised", hint="keep fewer layers in 16 bit")
    sizes = [sum(modules.model.get_submodule(name).weight.numel() for name in group) for group in chosen]
    costs = []
    for done, (group, size) in enumerate(zip(chosen, sizes, strict=True), start=1):
        with fake_quantized(modules.model, [group], inputs):
            quantised = answered.log_probabilities()
        kl = float((exact.exp() * (exact - quantised)).sum(-1).mean())
        changed = float((exact.argmax(-1) != quantised.argmax(-1)).float().mean())
        costs.append(Cost(tuple(group), kl, changed, size / sum(sizes)))
        if on_progress:
            on_progress(done, len(chosen))
    return sorted(costs, key=lambda cost: -cost.kl)


def by_kind(costs: Iterable[Cost]) -> list[Cost]:
    """The same products summed over layers: all down_proj, all q, k, v, and so on; dearest first.

    `pattern` of each is one for all layers, such as model.layers.*.mlp.down_proj.
    """
    kinds: dict[tuple[str, ...], list[Cost]] = defaultdict(list)
    for cost in costs:
        kinds[tuple(starred(layer) for layer in cost.layers)].append(cost)
    summed = [
        Cost(kind, sum(c.kl for c in group), sum(c.changed for c in group), sum(c.share for c in group))
        for kind, group in kinds.items()
    ]
    return sorted(summed, key=lambda cost: -cost.kl)


class _Answers:
    """Prompts with their answers, padded at the end: attention is causal, so it changes no row before."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> None:
        self._model = model
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, rows))
        self._ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # [n, width]
        column = torch.arange(width)
        starts = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        ends = torch.tensor([[len(row) - 1] for row in rows])
        self._asked = (column >= starts) & (
            column < ends
        )  # bool [n, width]: rows that predict an answer token

    def log_probabilities(self) -> Tensor:
        """float32 [positions, V] of the next token, at every position before a token of an answer."""
        with torch.no_grad():
            hidden = self._model.model(
                input_ids=self._ids, use_cache=False
            ).last_hidden_state  # [n, width, H]
            return torch.log_softmax(self._model.lm_head(hidden[self._asked]).float(), -1)
