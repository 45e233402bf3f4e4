"""Opens a bundle: its files checked, its graphs loaded, its tokenizer read, ready to decode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.decoding.sampling import SamplingParams
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.decoder import Decoder
from eagle_run.engine.graph_loading import Log, open_graphs
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.request import Piece, Request, Stats
from eagle_run.errors import UsageError
from eagle_run.tokenizer import Tokenizer


@dataclass
class Answer:
    """What one request gave. `finish_reason` is "stop" or "length", None while it is not over.

    `stats` counts the rounds that it took part in; their time is shared with the other slots.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)

    def add(self, piece: Piece, time: RoundTime) -> None:
        self.tokens += piece.tokens
        self.text += piece.text
        self.finish_reason = piece.finish_reason
        self.stats.count([piece.emitted])
        self.stats.tokens += len(piece.tokens)
        self.stats.prefill_seconds += piece.prefill_seconds
        self.stats.time(time.total, {"draft": time.draft, "target": time.verify})


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round; `glue` is all that is outside the graphs, or everything if they are not timed."""

    draft: float
    verify: float
    glue: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.glue


@dataclass(frozen=True)
class Decoded:
    """Finished answers, the counts of the run, and the time of each of its rounds."""

    answers: list[Answer]
    stats: Stats
    rounds: list[RoundTime]

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [answer.tokens for answer in self.answers]


@dataclass(frozen=True)
class Engine:
    """A bundle that is loaded and can decode. `tree` is the bundle's own, None without a draft head."""

    bundle: Bundle
    decoder: Decoder
    text: Tokenizer
    tree: TreeShape | None
    backend: str
    threads: int

    @property
    def batch(self) -> int:
        return self.decoder.runner.batch

    @property
    def device(self) -> str:
        """ "cpu", or which GPU: "cuda:0"."""
        return str(self.decoder.runner.device)

    @property
    def precision(self) -> str:
        return self.decoder.runner.precision

    def request(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        raw: bool = False,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Request:
        """A request from a text (one user turn; `raw` leaves the chat template out) or from chat messages.

        Stop tokens are the bundle's, none with `ignore_eos`. Raises UsageError for an empty stop string, and
        EagleError for an empty prompt or when the chat template refuses.
        """
        if isinstance(prompt, str):
            ids = self.text.encode_prompt(prompt, system=system, raw=raw)
        elif raw:
            raise UsageError("chat messages need the chat template", hint="leave out --raw")
        else:
            head = [] if system is None else [{"role": "system", "content": system}]
            ids = self.text.encode_chat([*head, *prompt])
        return Request(
            prompt=tuple(ids),
            sampling=sampling or SamplingParams(),
            max_new_tokens=max_new_tokens,
            stop_tokens=frozenset() if ignore_eos else frozenset(self.bundle.manifest.stop_token_ids),
            stop_strings=tuple(stop_strings),
        )

    def decode(
        self,
        requests: Sequence[Request],
        shape: TreeShape,
        *,
        rule: str = "topk",
        on_piece: Callable[[Piece], None] | None = None,
        decoded: Decoded | None = None,
    ) -> Decoded:
        """Runs `requests` to their ends, telling `on_piece` of each piece as it comes.

        `decoded`, if given, is filled as the run goes on: what is there survives an interrupt.
        """
        decoded = decoded or Decoded([], Stats(), [])
        decoded.answers.extend(Answer(stats=Stats(prompt_tokens=len(r.prompt))) for r in requests)
        stats, seen = decoded.stats, Stats()
        with one_torch_thread():
            for piece in self.decoder.generate(requests, shape, rule=rule, stats=stats):
                if stats.steps > seen.steps:  # with a batch, a round gives several pieces
                    decoded.rounds.append(_round_time(seen, stats))
                    seen = replace(stats)
                decoded.answers[piece.index].add(piece, decoded.rounds[-1])
                if on_piece:
                    on_piece(piece)
        return decoded


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Between the graphs one torch thread is enough, and more would be in the backend's way.

    The operations there are on a few rows: too small to gain from being split. A pool of torch threads would
    only compete for the cores with the backend's own. What the process had set before is put back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round_time(before: Stats, after: Stats) -> RoundTime:
    draft = after.draft_seconds - before.draft_seconds
    verify = after.verify_seconds - before.verify_seconds
    return RoundTime(draft, verify, after.decode_seconds - before.decode_seconds - draft - verify)


def open_engine(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    device: str = "auto",
    batch: int = 1,
    threads: int = 0,
    with_draft: bool = True,
    cuda_graphs: bool = True,
    log: Log | None = None,
) -> Engine:
    """Loads the bundle at `path` with its hashes verified.

    `backend` and `device` are those of `open_graphs`; `threads` is the number inside an operator of ONNX
    Runtime on a CPU (0: one per core); `batch` is how many prompts decode side by side. Without `with_draft`
    only plain decoding is possible, and the draft's memory is saved. `cuda_graphs`: on a GPU rounds are
    captured and replayed, where the backend allows it. `log` is told what the user should know.
    Raises EagleError for a bad bundle and for what this machine lacks.
    """
    bundle = load_bundle(os.fspath(path))
    limits = bundle.manifest.limits
    if not 1 <= batch <= limits.max_batch:
        raise UsageError(
            f"batch is {batch}; this bundle was built for 1 to {limits.max_batch}",
            hint="give a smaller --batch, or build the bundle with a larger --max-batch",
        )
    if threads < 0:
        raise UsageError(f"threads is {threads}; it must be at least 0 (0: one per core)")
    has_head = with_draft and bundle.manifest.head is not None
    opened = open_graphs(
        bundle, backend=backend, device=device, threads=threads, with_draft=with_draft, log=log
    )
    runner = ModelRunner(
        opened.graphs,
        batch=batch,
        draft_to_target=_vocabulary(bundle) if has_head else None,
        device=opened.device,
        precision=opened.precision,
    )
    engine = assemble(
        bundle,
        runner,
        backend=opened.backend,
        threads=threads,
        cuda_graphs=cuda_graphs,
    )
    bundle.check_unchanged()
    return engine


def assemble(
    bundle: Bundle,
    runner: ModelRunner,
    *,
    backend: str,
    threads: int,
    cuda_graphs: bool = True,
) -> Engine:
    """An engine that decodes in `runner`, with the bundle's limits, text and, if it has a draft, tree."""
    limits = bundle.manifest.limits
    text = Tokenizer.load(bundle.tokenizer_dir)
    decoder = Decoder(
        runner,
        max_seq_len=limits.max_seq_len,
        chunk=limits.prefill_chunk,
        text=text,
        max_nodes=limits.max_tree_nodes,
        rounds=CudaGraphRunner(runner.device, enabled=cuda_graphs),
    )
    defaults = bundle.manifest.tree if runner.has_draft else None
    return Engine(
        bundle=bundle,
        decoder=decoder,
        text=text,
        tree=None if defaults is None else defaults.shape(),
        backend=backend,
        threads=threads,
    )


def _vocabulary(bundle: Bundle) -> torch.Tensor:
    """Target id of each draft id, i64 [Vd]."""
    table = bundle.vocab_map()
    return torch.arange(bundle.manifest.target.vocab_size) if table is None else table
