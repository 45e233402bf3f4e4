"""`eagle-run generate`: prompts in, text on stdout as it comes, one line of statistics on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_run.bench.result import merge
from eagle_run.cli.options import note
from eagle_run.datasets import decode_utf8, read_prompts, read_text
from eagle_run.decoding.tree import TreeShape
from eagle_run.decoding.tree_spec import describe, spec_of
from eagle_run.engine.mismatch import Mismatch, find_mismatch
from eagle_run.engine.opening import Decoded, Engine
from eagle_run.engine.request import Piece, Request, Stats
from eagle_run.errors import EagleError, UsageError

Prompt = str | list[dict[str, Any]]


def gather_prompts(texts: Sequence[str], text_file: str | None, prompts_file: str | None) -> Sequence[Prompt]:
    """The prompts of a command line: --prompt (repeatable), --prompt-file or --prompts, else all of stdin.

    "-" as text or file stands for stdin. Raises UsageError when two ways are mixed or nothing is given, and
    EagleError for an empty prompt or for bytes that are not UTF-8.
    """
    if sum(map(bool, (texts, text_file, prompts_file))) > 1:
        raise UsageError("--prompt, --prompt-file and --prompts exclude each other", hint="give one of them")
    if prompts_file:
        return read_prompts(prompts_file)
    if texts:
        prompts = [_read_stdin() if text == "-" else text for text in texts]
    else:
        prompts = [_read_stdin() if text_file in (None, "-") else read_text(str(text_file))]
    for text in prompts:
        if not text.strip():
            raise EagleError("the prompt is empty", hint="give some text with --prompt, or on standard input")
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line that are not UTF-8 arrive as surrogates
            raise EagleError("the prompt is not valid UTF-8", hint="put it into a UTF-8 file") from None
    return prompts


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt", hint="give one with --prompt, or on standard input")
    return decode_utf8(sys.stdin.buffer.read(), "standard input")


@dataclass
class Printer:
    """Text to stdout: of a single answer as it comes, of several each when it is over, in order.

    `first` is the index of the group's first answer, `count` their number.
    """

    first: int
    count: int
    several: bool
    texts: list[str] = field(init=False)
    done: set[int] = field(default_factory=set)
    shown: int = 0
    begun: bool = False

    def __post_init__(self) -> None:
        self.texts = [""] * self.count

    def __call__(self, piece: Piece) -> None:
        self.begun = True
        self.texts[piece.index] += piece.text
        if not self.several:
            _write(piece.text)
            return
        if piece.finish_reason is not None:
            self.done.add(piece.index)
        while self.shown in self.done:
            self._show()

    def close(self) -> None:
        """Ends the line of a single answer; shows what an interrupt left of several."""
        if not self.begun:
            return
        while self.several and any(self.texts[self.shown :]):
            self._show()
        if not self.several and not self.texts[0].endswith("\n"):
            _write("\n")

    def _show(self) -> None:
        _write(f"[{self.first + self.shown}] {self.texts[self.shown].rstrip()}\n")
        self.shown += 1


@dataclass
class JsonPrinter:
    """A line of JSON for every answer that is over, in order; an interrupt adds those that had begun."""

    decoded: Decoded
    report: Callable[[int], dict[str, Any]]
    shown: int = 0

    def __call__(self, piece: Piece) -> None:
        answers = self.decoded.answers
        while self.shown < len(answers) and answers[self.shown].finish_reason is not None:
            self._show()

    def close(self) -> None:
        while any(answer.tokens for answer in self.decoded.answers[self.shown :]):
            self._show()

    def _show(self) -> None:
        _write_json(self.report(self.shown))
        self.shown += 1


def _write_json(report: dict[str, Any]) -> None:
    _write(json.dumps(report, ensure_ascii=False) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass
class Generation:
    """A run over prompts, `engine.batch` of them at a time.

    With `compare` each group of that many is decoded a second time without a tree; which goes first
    alternates. Otherwise there are no groups: a prompt starts when another one's answer ends.
    """

    engine: Engine
    shape: TreeShape
    rule: str
    compare: bool
    as_json: bool
    speculative: list[Stats] = field(default_factory=list)
    plain: list[Stats] = field(default_factory=list)
    mismatches: int = 0
    faults: int = 0  # mismatches that are no ties

    def run(self, requests: Sequence[Request]) -> None:
        """Decodes and prints everything; what is out already stays when it is interrupted.

        Raises EagleError before anything is decoded when one of the requests cannot be.
        """
        self.engine.decoder.check(requests, self.shape, rule=self.rule)
        if not self.compare:
            self._speculative(requests, 0, several=len(requests) > 1)
            return
        short = replace(requests[0], max_new_tokens=min(8, requests[0].max_new_tokens))
        for shape in (TreeShape.plain(), self.shape):  # a warm-up, for a fair comparison
            self.engine.decode([short] * self.engine.batch, shape, rule=self.rule)
        for number, first in enumerate(range(0, len(requests), self.engine.batch)):
            group = requests[first : first + self.engine.batch]
            plain = self._plain(group) if number % 2 else None
            decoded = self._speculative(group, first, several=len(requests) > 1)
            self._finish(first, group, decoded, plain or self._plain(group))

    def _speculative(self, group: Sequence[Request], first: int, *, several: bool) -> Decoded:
        decoded = Decoded([], Stats(), [])
        self.speculative.append(decoded.stats)  # at once: an interrupt still shows its statistics
        printer: Printer | JsonPrinter = Printer(first, len(group), several)
        if self.as_json:
            printer = JsonPrinter(decoded, lambda place: self._report(first, group, decoded, place))
            if self.compare:  # printed when both ways are there
                return self.engine.decode(group, self.shape, rule=self.rule, decoded=decoded)
        try:
            self.engine.decode(group, self.shape, rule=self.rule, on_piece=printer, decoded=decoded)
        finally:
            printer.close()
        return decoded

    def _plain(self, group: Sequence[Request]) -> Decoded:
        decoded = self.engine.decode(group, TreeShape.plain(), rule=self.rule)
        self.plain.append(decoded.stats)
        return decoded

    def _finish(self, first: int, group: Sequence[Request], decoded: Decoded, plain: Decoded) -> None:
        """Compares a group that is done, and prints it where JSON is wanted."""
        decoder = self.engine.decoder
        for place, (request, answer) in enumerate(zip(group, decoded.answers, strict=True)):
            comparable = self.rule == "topk" or request.sampling.temperature == 0
            expected, found = plain.answers[place].tokens, None
            if comparable:
                found = find_mismatch(decoder.runner, request, expected, answer.tokens, chunk=decoder.chunk)
            comparison = _compared(decoded.stats, plain.stats, found, comparable=comparable)
            if found:
                self.mismatches += 1
                self.faults += not found.tie
                note(_explain(first + place, found))
            if self.as_json:
                report = self._report(first, group, decoded, place)
                _write_json({**report, "compare": comparison})

    def _report(self, first: int, group: Sequence[Request], decoded: Decoded, place: int) -> dict[str, Any]:
        """One answer in JSON."""
        answer = decoded.answers[place]
        return {
            "index": first + place,
            "bundle": self.engine.bundle.manifest.name,
            "tree": spec_of(self.shape),
            "draft": self.rule,
            "prompt_tokens": len(group[place].prompt),
            "text": answer.text,
            "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
            "statistics": statistics(answer.stats),
        }

    def summary(self) -> str:
        """The line of statistics."""
        stats = merge(self.speculative)
        parts = [
            f"{stats.tokens} tokens at {stats.tokens_per_second:.1f} tokens/s",
            f"{stats.tokens_per_round:.2f} tokens per round over {stats.rounds} rounds",
            f"prompt {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s",
            describe(self.shape),
        ]
        if self.compare and len(self.plain) == len(self.speculative):
            rate = merge(self.plain).tokens_per_second
            parts.append(f"speed-up {stats.tokens_per_second / rate:.2f}x over plain decoding ({rate:.1f})")
            if self.mismatches:
                parts.append(f"{self.mismatches} answers DIFFER from plain decoding")
            elif self.rule == "topk":
                parts.append("tokens identical to plain decoding")
        return " | ".join(parts)


def _compared(stats: Stats, plain: Stats, mismatch: Mismatch | None, *, comparable: bool) -> dict[str, Any]:
    """`identical` is None for sampled drafts at T > 0: other coins, so only the law is the same."""
    return {
        "plain_tokens_per_second": round(plain.tokens_per_second, 3),
        "speedup": round(stats.tokens_per_second / plain.tokens_per_second, 4),
        "identical": mismatch is None if comparable else None,
        "mismatch": mismatch.as_dict() if mismatch else None,
    }


def statistics(stats: Stats) -> dict[str, Any]:
    """A run in JSON: rates, acceptance, and mean milliseconds of a round by phase."""
    return {
        "tokens": stats.tokens,
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "tokens_per_round": round(stats.tokens_per_round, 4),
        "rounds": stats.rounds,
        "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth],
        "prefill_seconds": round(stats.prefill_seconds, 4),
        "decode_seconds": round(stats.decode_seconds, 4),
        **{name: round(value, 3) for name, value in stats.phases().items()},
    }


def _explain(index: int, mismatch: Mismatch) -> str:
    where = f"answer {index} differs from plain decoding at token {mismatch.position}"
    if mismatch.gap is None:
        return f"{where}: one of them ends there"
    kind = "a tie that rounding decided" if mismatch.tie else "NOT a tie: please report this"
    return f"{where}: {mismatch.speculative} instead of {mismatch.plain}, gap {mismatch.gap:.1e} ({kind})"
