"""How rounds speculate: which tree is drafted, and by which rule its tokens are drafted and accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from eagle_run.decoding.tree import TreeShape
from eagle_run.errors import UsageError


class AcceptanceRule(StrEnum):
    """How children are drafted and accepted; both emit exactly the target's distribution p.

    TOPK: the head's k likeliest tokens; draw x ~ p and follow it down the tree (`target_sampling`).
    SAMPLED: drawn from q without replacement; accept with min(1, p/q) (`rejection_sampling`).
    """

    TOPK = "topk"
    SAMPLED = "sampled"


@dataclass(frozen=True)
class SpeculativeConfig:
    """What a round drafts, and how it accepts. Hashable: a part of the key of captured rounds.

    Raises UsageError for sampled children in a dynamic tree: to choose drawn children by their score would
    change the distribution.
    """

    tree: TreeShape = field(default_factory=TreeShape.plain)
    acceptance: AcceptanceRule = AcceptanceRule.TOPK

    def __post_init__(self) -> None:
        object.__setattr__(self, "acceptance", AcceptanceRule(self.acceptance))
        if self.tree.kind == "dynamic" and self.acceptance is AcceptanceRule.SAMPLED:
            raise UsageError(
                "sampled drafts need a tree that is fixed before they are drawn, and a dynamic one is not",
                hint="take a static tree or a chain, or top-k drafts",
                parameters=["tree", "draft"],
            )

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted: not in plain decoding."""
        return bool(self.tree.levels)

    @property
    def path_rows(self) -> int:
        """Most tokens that a round emits for a sequence."""
        return self.tree.depth + 1


PLAIN = SpeculativeConfig()
