"""generate(): prompts in, text and tokens out, round by round. Plain decoding is the tree with one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle_run.backends.stream import on_stream, wait
from eagle_run.decoding.sampling import SamplingParams, stack
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.model_runner import BatchState, ModelRunner
from eagle_run.engine.request import Piece, Request, Stats
from eagle_run.engine.scheduler import Job, Slots
from eagle_run.errors import EagleError, UsageError
from eagle_run.tokenizer import Tokenizer


class Decoder:
    """Runs requests through a runner in rounds, `runner.batch` of them at a time.

    `text` turns tokens into text as they come; without it pieces carry tokens only. `max_nodes` is the
    largest tree that the graphs were built for; None leaves it to the room in the caches. `rounds` runs the
    rounds: by default, on a GPU, as CUDA graphs. With `run_ahead` (the default there) the host issues a round
    before it reads the one before; that an answer ended is then noticed one round late.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_seq_len: int,
        chunk: int,
        text: Tokenizer | None = None,
        max_nodes: int | None = None,
        run_ahead: bool | None = None,
        rounds: CudaGraphRunner | None = None,
    ) -> None:
        self.runner = runner
        self.max_nodes = max_nodes
        self.max_seq_len = max_seq_len
        self.chunk = chunk
        self.text = text
        self.run_ahead = runner.device.type == "cuda" if run_ahead is None else run_ahead
        self.rounds = rounds or CudaGraphRunner(runner.device)
        self._states: dict[int, BatchState] = {}

    def generate(
        self, requests: Sequence[Request], shape: TreeShape, *, rule: str = "topk", stats: Stats | None = None
    ) -> Iterator[Piece]:
        """Yields pieces as rounds finish; the last piece of each request carries its finish reason.

        A slot whose request has finished takes the next one, while the others go on. `rule` is how children
        are drafted and accepted: "topk" (the k most likely; draw x ~ p and follow) or "sampled" (drawn from q
        without replacement; rejection sampling). Both emit exactly p.
        Raises EagleError for what `check` refuses, before anything is computed.
        """
        self.check(requests, shape, rule=rule)
        slots = Slots(
            self.runner,
            self.state(shape),
            self.rounds,
            [Job(index, request, self.max_seq_len, self.text) for index, request in enumerate(requests)],
            shape,
            rule=rule,
            stats=stats if stats is not None else Stats(),
            chunk=self.chunk,
            ahead=int(self.run_ahead),
        )
        try:
            while slots.unfinished:
                slots.fill()
                slots.launch()
                yield from slots.collect()
        finally:  # left in the middle, a round may be under way on memory that the caller is about to free
            wait(self.runner.device)

    def state(self, shape: TreeShape) -> BatchState:
        """The state of rounds of this shape, always the same one: captured rounds hold its memory."""
        rows = shape.depth + 1
        if rows not in self._states:
            with on_stream(self.runner.device):
                settings = stack([SamplingParams()] * self.runner.batch, self.runner.device)
                self._states[rows] = self.runner.new_state(rows, settings)
        return self._states[rows]

    def check(self, requests: Sequence[Request], shape: TreeShape, *, rule: str = "topk") -> None:
        """Can all of this be decoded? Costs nothing, and names a request by its place in `requests`.

        Raises EagleError for an empty prompt or one that leaves no room in the context, and UsageError for a
        tree that does not go with the bundle or the rule.
        """
        for index, request in enumerate(requests):
            if not request.prompt:
                raise EagleError(f"prompt {index} is empty", hint="give at least one token")
            if len(request.prompt) >= self.max_seq_len:
                raise EagleError(
                    f"prompt {index} has {len(request.prompt)} tokens; the bundle's context is "
                    f"{self.max_seq_len}, the answer included",
                    hint="shorten the prompt, or build the bundle with a larger --max-seq-len",
                )
            if request.max_new_tokens < 1:
                raise UsageError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        self._check_rows(shape)
        if shape.kind == "dynamic" and rule == "sampled":
            raise UsageError(
                "sampled drafts need a tree that is fixed before they are drawn, and a dynamic one is not",
                hint="take a static tree or a chain, or the rule topk",
            )
        if shape.levels and not self.runner.has_draft:
            raise UsageError(
                "this bundle has no draft head, so only plain decoding is possible",
                hint="use --tree plain, or build the bundle with --head",
            )

    def _check_rows(self, shape: TreeShape) -> None:
        """The tree must not pass what the bundle was built for, nor what one forward writes the caches."""
        if self.max_nodes is not None and shape.nodes > self.max_nodes:
            raise UsageError(
                f"this tree has {shape.nodes} nodes, the root included; the bundle was built for "
                f"{self.max_nodes}",
                hint="take a smaller tree, or build the bundle with a larger --max-tree-nodes",
            )
        widest = max((level.width for level in shape.levels), default=1)
        if self.max_nodes is not None and widest > self.max_nodes:
            raise UsageError(
                f"a level of this tree has {widest} rows; the bundle was built for {self.max_nodes}",
                hint="take a smaller top-k, or build the bundle with a larger --max-tree-nodes",
            )
        there, behind = self.runner.cache_rows, max(self.chunk, shape.cache_rows)
        if self.max_seq_len + behind <= there:
            return
        found = f"{self.max_seq_len + behind} cache rows; the bundle's graphs have {there}"
        if shape.cache_rows == behind:
            raise UsageError(
                f"this tree needs {found}",
                hint="take a smaller tree, or build the bundle with a larger --max-tree-nodes",
            )
        raise UsageError(
            f"prefill in chunks of {self.chunk} tokens needs {found}",
            hint="take smaller chunks, or build the bundle again with this chunk",
        )
