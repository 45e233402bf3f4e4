"""The options that several commands of eagle-run share. Imports nothing heavy: `--help` must be fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from eagle_run.decoding.tree import TreeShape
    from eagle_run.llm import LLM
    from eagle_run.params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

TREE_NOTE = """
\b
Trees, and the names that others give to their sizes:
  --tree default              the bundle's own
  --tree auto                 measure a few on this machine (once), take the fastest; plain if none wins
  --tree plain                no drafting
  --tree chain:3              vLLM: num_speculative_tokens 3
  --tree dynamic:4,4,16       depth 4, top-k 4, 16 nodes with the root
                              SGLang: num-steps 4, eagle-topk 4, num-draft-tokens 16
                              SafeAILab: depth 3 (one less), top-k 4, total-token 16
  --tree static:0,0,1         the parents of nodes 1, 2, 3: two under the root (0), one under node 1
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
    max_tokens: int
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

    def params(self, *, stop: tuple[str, ...] = (), ignore_eos: bool = False) -> SamplingParams:
        """How to sample. Like `check`, it judges the words alone: nothing heavy is loaded for it."""
        from eagle_run.params import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
        )

    def check(self) -> str | TreeShape:
        """The tree as `LLM` takes it. Raises UsageError for options that no bundle could make sense of."""
        from eagle_run.decoding.config import AcceptanceRule, SpeculativeConfig
        from eagle_run.decoding.tree import TreeShape
        from eagle_run.decoding.tree_spec import parse_tree_spec
        from eagle_run.errors import UsageError

        options = self._tree_options()
        options.check()
        if self.retune and self.tree != "auto":
            raise UsageError(
                f"--retune measures for --tree auto, not for {self.tree}", hint="add --tree auto"
            )
        sampled = self.draft == AcceptanceRule.SAMPLED
        if options.is_legacy:
            if sampled and self.tree == "dynamic":  # whatever its sizes
                SpeculativeConfig(TreeShape.dynamic(1, 1, 2), AcceptanceRule.SAMPLED)
            return self._legacy_tree(fixed=sampled)
        if self.tree in ("default", "auto"):
            return self.tree
        tree = parse_tree_spec(self.tree)
        SpeculativeConfig(tree, AcceptanceRule(self.draft))
        return tree

    def open(self, batch: int = 1, params: SamplingParams | None = None) -> LLM:
        """Loads the bundle; a spinner on a terminal, since large ones take their time."""
        from eagle_run.bundle.loading import read_manifest

        tree = self.check()
        read_manifest(self.bundle)  # what is no bundle is refused before torch is loaded
        with working(f"loading {self.bundle}"):
            from eagle_run.llm import LLM

            return LLM(
                self.bundle,
                tree=tree,
                draft=self.draft,
                backend=self.backend,
                device=self.device,
                batch=batch,
                threads=self.threads,
                cuda_graphs=self.cuda_graphs,
                tune_for=params or self.params(),
                retune=self.retune,
                log=note,
            )

    def _tree_options(self) -> Any:
        from eagle_run.cli.legacy_tree import TreeOptions

        return TreeOptions(self.tree, self.depth, self.branch, self.nodes, self.parents)

    def _legacy_tree(self, *, fixed: bool) -> TreeShape:
        from eagle_run.bundle.loading import read_manifest
        from eagle_run.cli.legacy_tree import legacy_tree
        from eagle_run.decoding.tree_spec import spec_of

        defaults = read_manifest(self.bundle).tree
        own = None if defaults is None else defaults.shape()
        tree = legacy_tree(self._tree_options(), own, fixed=fixed)
        note(f"note: sizes of a tree as options are the old way; this is --tree {spec_of(tree)}")
        return tree


def common_options(*, max_tokens: int) -> Callable[[F], F]:
    """The argument BUNDLE and all options of `Options`, passed to the command as one `options`."""

    def decorate(function: F) -> F:
        @wraps(function)
        def command(**values: Any) -> Any:
            common = {field.name: values.pop(field.name) for field in fields(Options)}
            return function(options=Options(**common), **values)

        wrapped: Any = command
        for option in reversed([*_options(max_tokens)]):
            wrapped = option(wrapped)
        return cast(F, wrapped)

    return decorate


def _options(max_tokens: int) -> Iterator[Callable[[Any], Any]]:
    yield click.argument("bundle", type=click.Path(path_type=Path))
    yield click.option(
        "--max-tokens",
        "--max-new-tokens",
        "max_tokens",
        type=int,
        default=max_tokens,
        show_default=True,
        help="Longest answer, in tokens.",
    )
    yield click.option(
        "--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token."
    )
    yield click.option("--top-k", type=int, default=0, help="Sample among the K most likely; 0 or -1 is off.")
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
        help="default, auto, plain, chain:D, dynamic:D,K,N, static:P,P,... or a file; see below.",
    )
    yield click.option("--retune", is_flag=True, help="With --tree auto: measure again.")
    # The old way, still understood (see legacy_tree.py).
    yield click.option("--depth", type=int, hidden=True)
    yield click.option("--branch", "--tree-top-k", "branch", type=int, hidden=True)
    yield click.option("--nodes", type=int, hidden=True)
    yield click.option("--parents", metavar="P,P,...", hidden=True)


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
