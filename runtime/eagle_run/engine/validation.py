"""What an engine refuses before anything is computed: prompts and trees that its caches have no room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.errors import EagleError, UsageError
from eagle_run.params import SamplingParams


@dataclass(frozen=True)
class EngineLimits:
    """Sizes, in tokens: the longest sequence, the most prompt tokens in one forward, the largest tree.

    `max_tree_nodes` None leaves the tree to the room in the caches.
    """

    max_seq_len: int
    prefill_chunk: int
    max_tree_nodes: int | None = None


def check_prompt(
    runner: ModelRunner,
    limits: EngineLimits,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    has_text: bool,
) -> None:
    """Raises EagleError for a prompt that cannot be continued; its ids must be the target's."""
    if not token_ids:
        raise EagleError("the prompt is empty", hint="give at least one token")
    vocab_size = int(runner.graphs["target"].spec.tensor("logits").shape[-1])
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in token_ids):
        raise EagleError(
            f"the prompt has token ids outside 0 to {vocab_size - 1}",
            hint="encode it with the bundle's tokenizer",
        )
    if len(token_ids) >= limits.max_seq_len:
        raise EagleError(
            f"the prompt has {len(token_ids)} tokens; the bundle's context is {limits.max_seq_len}, "
            "the answer included",
            hint="shorten the prompt, or build the bundle with a larger context",
            parameters=["max_seq_len"],
        )
    if params.stop and not has_text:
        raise UsageError("stop strings need a tokenizer, which this engine has not")


def check_speculative(runner: ModelRunner, limits: EngineLimits, speculative: SpeculativeConfig) -> None:
    """Raises UsageError for a tree past what the bundle was built for, or past what its caches hold."""
    tree, most = speculative.tree, limits.max_tree_nodes
    if speculative.drafts and not runner.has_draft:
        raise UsageError(
            "this bundle has no draft head, so only plain decoding is possible",
            hint="decode with the tree plain, or build the bundle with a head",
            parameters=["tree", "head"],
        )
    larger = "or build the bundle for larger trees"
    if most is not None and tree.nodes > most:
        raise UsageError(
            f"this tree has {tree.nodes} nodes, the root included; the bundle was built for {most}",
            hint=f"take a smaller tree, {larger}",
            parameters=["max_tree_nodes"],
        )
    widest = max((level.width for level in tree.levels), default=1)
    if most is not None and widest > most:
        raise UsageError(
            f"a level of this tree has {widest} rows; the bundle was built for {most}",
            hint=f"take fewer children a node, {larger}",
            parameters=["max_tree_nodes"],
        )
    _check_cache(runner, limits, speculative)


def _check_cache(runner: ModelRunner, limits: EngineLimits, speculative: SpeculativeConfig) -> None:
    """One forward of a round or of prefill may write so many rows behind the longest sequence."""
    tree_rows = speculative.tree.cache_rows
    needed = limits.max_seq_len + max(limits.prefill_chunk, tree_rows)
    if needed <= runner.cache_rows:
        return
    lacking = f"needs {needed} cache rows; the bundle's graphs have {runner.cache_rows}"
    if tree_rows >= limits.prefill_chunk:
        raise UsageError(
            f"this tree {lacking}",
            hint="take a smaller tree, or build the bundle for larger trees",
            parameters=["max_tree_nodes"],
        )
    raise UsageError(
        f"prefill in chunks of {limits.prefill_chunk} tokens {lacking}",
        hint="take smaller chunks, or build the bundle again with this chunk",
        parameters=["prefill_chunk"],
    )
