"""The options that several commands of eagle-run share. Imports nothing heavy: `--help` must be fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from eagle_run.decoding.sampling import SamplingParams
    from eagle_run.decoding.tree import TreeShape
    from eagle_run.engine.opening import Engine

F = TypeVar("F", bound=Callable[..., Any])

TREE_NOTE = """
\b
Trees, and the names that others give to their sizes:
  --tree default              the bundle's own
  --tree auto                 measure a few on this machine (once), take the fastest; plain if none wins
  --tree plain                no drafting
  --tree chain:3              --tree chain --depth 3       vLLM: num_speculative_tokens 3
  --tree dynamic:4,4,16       --tree dynamic --depth 4 --branch 4 --nodes 16
                              SGLang: num-steps 4, eagle-topk 4, num-draft-tokens 16
                              SafeAILab: depth 3 (one less), top-k 4, total-token 16
  --tree static:0,0,1         --parents 0,0,1: nodes 1 and 2 under the root (0), node 3 under node 1
  --tree FILE.json            parents, or SafeAILab's paths such as [[0], [1], [0, 0]]
"""


@dataclass(frozen=True)
class Options:
    """What generate, chat and bench have in common, as given on the command line."""

    bundle: Path
    backend: str
    device: str
    threads: int
    cuda_graphs: bool
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    draft: str
    tree: str
    depth: int | None
    branch: int | None
    nodes: int | None
    parents: str | None
    retune: bool

    def open(self, batch: int = 1) -> Engine:
        """Loads the bundle; a spinner on a terminal, since large ones take their time.

        Raises UsageError first for options that no bundle could make sense of.
        """
        self._check()
        with working(f"loading {self.bundle}"):
            from eagle_run.engine.opening import open_engine

            return open_engine(
                self.bundle,
                backend=self.backend,
                device=self.device,
                batch=batch,
                threads=self.threads,
                with_draft=self.tree != "plain",
                cuda_graphs=self.cuda_graphs,
                log=note,
            )

    def _check(self) -> None:
        from eagle_run.errors import UsageError

        if self.retune and self.tree != "auto":
            raise UsageError(
                f"--retune measures for --tree auto, not for {self.tree}", hint="add --tree auto"
            )
        if self.draft == "sampled" and self.tree.partition(":")[0] == "dynamic":
            raise UsageError(
                "--draft sampled needs a tree that is fixed before it is drawn, and a dynamic one is not",
                hint="take a static tree or a chain, or --draft topk",
            )

    def sampling(self) -> SamplingParams:
        from eagle_run.decoding.sampling import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )

    def shape(self, engine: Engine) -> TreeShape:
        """The tree asked for; with `auto` the fastest, measured now or remembered."""
        from eagle_run.decoding.tree_spec import TreeOptions, choose
        from eagle_run.errors import UsageError

        asked = TreeOptions(self.tree, self.depth, self.branch, self.nodes, self.parents)
        if self.tree != "auto":
            return choose(asked, engine.tree, self.draft)
        if asked.sized or self.parents is not None:
            raise UsageError("--tree auto finds the sizes itself", hint="leave out the tree's sizes")
        from eagle_run.tuning.tree_tuning import auto_tree

        return auto_tree(engine, sampling=self.sampling(), rule=self.draft, retune=self.retune, log=note).tree


def common_options(*, max_new_tokens: int) -> Callable[[F], F]:
    """The argument BUNDLE and all options of `Options`, passed to the command as one `options`."""

    def decorate(function: F) -> F:
        @wraps(function)
        def command(**values: Any) -> Any:
            common = {field.name: values.pop(field.name) for field in fields(Options)}
            return function(options=Options(**common), **values)

        wrapped: Any = command
        for option in reversed([*_options(max_new_tokens)]):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _options(max_new_tokens: int) -> Iterator[Callable[[Any], Any]]:
    yield click.argument("bundle", type=click.Path(path_type=Path))
    yield click.option(
        "--max-new-tokens", type=int, default=max_new_tokens, show_default=True, help="Longest answer."
    )
    yield click.option(
        "--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token."
    )
    yield click.option("--top-k", type=int, default=0, help="Sample among the K most likely; 0 is off.")
    yield click.option(
        "--top-p", type=float, default=1.0, help="Sample from this share of the mass; 1 is off."
    )
    yield click.option(
        "--min-p", type=float, default=0.0, help="Drop what is less likely than this times the top; 0 is off."
    )
    yield click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same tokens.")
    yield from _tree_options()
    yield click.option(
        "--backend",
        type=click.Choice(["auto", "onnxruntime", "tensorrt", "tensorrt-rtx"]),
        default="auto",
        show_default=True,
        help="auto: the bundle's TensorRT engines if they are for this GPU, else ONNX Runtime.",
    )
    yield click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: the GPU for engines, the CPU for ONNX graphs. cuda: the GPU for either.",
    )
    yield click.option(
        "--threads", type=click.IntRange(min=0), default=0, help="CPU threads; 0 takes one per core."
    )
    yield click.option(
        "--cuda-graphs/--no-cuda-graphs",
        default=True,
        show_default=True,
        help="On a GPU, capture rounds as CUDA graphs.",
    )
    yield click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")


def _tree_options() -> Iterator[Callable[[Any], Any]]:
    yield click.option(
        "--draft",
        type=click.Choice(["topk", "sampled"]),
        default="topk",
        show_default=True,
        help="Children are the head's most likely tokens, or drawn from it. Both are lossless.",
    )
    yield click.option(
        "--tree",
        default="default",
        show_default=True,
        metavar="TREE",
        help="default, auto, dynamic, static, chain, plain, a spec or a file; see below.",
    )
    yield click.option("--depth", type=int, help="Most drafted tokens in a row.")
    yield click.option("--branch", "--tree-top-k", "branch", type=int, help="Most children of a node.")
    yield click.option(
        "--nodes", type=int, help="Tokens that the target verifies at once, the root included."
    )
    yield click.option("--parents", metavar="P,P,...", help="A static tree: the parent of nodes 1, 2, ...")
    yield click.option("--retune", is_flag=True, help="With --tree auto: measure again.")


def note(message: str) -> None:
    """A line for the reader, not for the data: stderr."""
    click.echo(message, err=True)


@contextmanager
def working(message: str) -> Iterator[None]:
    """A spinner on stderr while something takes long; nothing unless that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield
