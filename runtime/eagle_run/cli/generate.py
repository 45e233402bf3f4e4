"""`eagle-run generate`: prompts in, text on stdout as it comes, one line of statistics on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle_run.cli.options import note
from eagle_run.datasets import decode_utf8, read_prompts, read_text
from eagle_run.decoding.config import PLAIN, AcceptanceRule, SpeculativeConfig
from eagle_run.decoding.tree_spec import describe, spec_of
from eagle_run.errors import EagleError, UsageError
from eagle_run.metrics import Metrics, total_metrics
from eagle_run.outputs import RequestOutput

if TYPE_CHECKING:
    from eagle_run.bench.mismatch import Mismatch
    from eagle_run.engine.offline import OfflineRequest, OfflineRun
    from eagle_run.llm import LLM

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


def encode_prompts(
    llm: LLM, prompts: Sequence[Prompt], *, system: str | None, raw: bool
) -> list[tuple[int, ...]]:
    """Token ids of each: a text is one user turn, `raw` leaves the chat template out."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = llm.tokenizer.encode_prompt(prompt, system=system, raw=raw)
        elif raw:
            raise UsageError("chat messages need the chat template", hint="leave out --raw")
        else:
            head = [] if system is None else [{"role": "system", "content": system}]
            ids = llm.tokenizer.encode_chat([*head, *prompt])
        encoded.append(tuple(ids))
    return encoded


@dataclass
class Answer:
    """What has come of an answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def add(self, delta: RequestOutput) -> None:
        completion = delta.outputs[0]
        self.text += completion.text
        self.token_ids += completion.token_ids
        self.finish_reason = completion.finish_reason
        self.metrics = delta.metrics


@dataclass
class Printer:
    """Text to stdout: of a single answer as it comes, of several each when it is over, in order.

    `first` is the number of the group's first answer.
    """

    answers: list[Answer]
    first: int
    several: bool
    shown: int = 0

    def __call__(self, text: str) -> None:
        """Shows what has become ready; `text` is what the last output brought."""
        if not self.several:
            _write(text)
            return
        while self.shown < len(self.answers) and self.answers[self.shown].finish_reason is not None:
            self._show()

    def close(self) -> None:
        """Ends the line of a single answer; shows what an interrupt left of several."""
        if not any(answer.token_ids for answer in self.answers):
            return
        while self.several and any(answer.text for answer in self.answers[self.shown :]):
            self._show()
        if not self.several and not self.answers[0].text.endswith("\n"):
            _write("\n")

    def _show(self) -> None:
        _write(f"[{self.first + self.shown}] {self.answers[self.shown].text.rstrip()}\n")
        self.shown += 1


@dataclass
class JsonPrinter:
    """A line of JSON for every answer that is over, in order; an interrupt adds those that had begun."""

    answers: list[Answer]
    report: Callable[[int], dict[str, Any]]
    shown: int = 0

    def __call__(self, _: str) -> None:
        while self.shown < len(self.answers) and self.answers[self.shown].finish_reason is not None:
            self._show()

    def close(self) -> None:
        """After an interrupt: the answers that had begun, and one line at least."""
        while any(answer.token_ids for answer in self.answers[self.shown :]):
            self._show()
        if not self.shown:
            _write_json({"interrupted": True})

    def _show(self) -> None:
        report = self.report(self.shown)
        if self.answers[self.shown].finish_reason is None:
            report["interrupted"] = True
        _write_json(report)
        self.shown += 1


def _write_json(report: dict[str, Any]) -> None:
    _write(json.dumps(report, ensure_ascii=False) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass
class Generation:
    """A run over prompts.

    With `compare` each group of a batch is decoded a second time without a tree; which goes first alternates.
    Otherwise there are no groups: a prompt starts when another one's answer ends.
    """

    llm: LLM
    requests: Sequence[OfflineRequest]
    compare: bool
    as_json: bool
    metrics: list[Metrics] = field(default_factory=list)
    plain: list[Metrics] = field(default_factory=list)
    mismatches: int = 0
    faults: int = 0  # mismatches that are no ties

    @property
    def speculative(self) -> SpeculativeConfig:
        return self.llm.engine.speculative

    def run(self) -> None:
        """Decodes and prints everything; what is out already stays when it is interrupted.

        Raises EagleError before anything is decoded when one of the requests cannot be.
        """
        if self.compare:
            self._run_groups()
        else:
            self._stream()

    def _stream(self) -> None:
        answers = [Answer() for _ in self.requests]
        request_ids = [str(number) for number in range(len(answers))]
        printer: Printer | JsonPrinter = Printer(answers, 0, several=len(answers) > 1)
        if self.as_json:
            printer = JsonPrinter(answers, lambda number: self._report(number, answers[number]))
        start = self.llm.metrics.copy()
        outputs = self.llm.stream(
            [request.prompt_token_ids for request in self.requests],
            [request.params for request in self.requests],
            request_ids=request_ids,
        )
        try:
            for output in outputs:
                if output.error is not None:
                    raise output.error
                answers[int(output.request_id)].add(output)
                printer(output.outputs[0].text)
        finally:
            self.metrics.append(self.llm.metrics.since(start))
            printer.close()

    def _run_groups(self) -> None:
        from eagle_run.engine.offline import run_offline

        batch = self.llm.engine.runner.batch
        self.llm.check([request.prompt_token_ids for request in self.requests])
        short = [self.requests[0].shortened(8)] * batch
        for speculative in (PLAIN, self.speculative):  # a warm-up, for a fair comparison
            run_offline(self.llm.engine, short, speculative)
        for number, first in enumerate(range(0, len(self.requests), batch)):
            group = self.requests[first : first + batch]
            plain = self._plain(group) if number % 2 else None
            run = self._print_group(group, first)
            self._compare(first, group, run, plain or self._plain(group))

    def _print_group(self, group: Sequence[OfflineRequest], first: int) -> OfflineRun:
        """Runs a group, its text on stdout as it comes; JSON waits for the comparison."""
        from eagle_run.engine.offline import run_offline

        answers = [Answer() for _ in group]
        printer = Printer(answers, first, several=len(self.requests) > 1)

        def show(number: int, output: RequestOutput) -> None:
            completion, answer = output.outputs[0], answers[number]
            text, answer.text = completion.text[len(answer.text) :], completion.text
            answer.token_ids, answer.finish_reason = list(completion.token_ids), completion.finish_reason
            printer(text)

        try:
            run = run_offline(
                self.llm.engine, group, self.speculative, on_output=None if self.as_json else show
            )
        except KeyboardInterrupt:
            if self.as_json:
                _write_json({"index": first, "interrupted": True})
            raise
        finally:
            printer.close()
        self.metrics.append(run.metrics)
        return run

    def _plain(self, group: Sequence[OfflineRequest]) -> OfflineRun:
        from eagle_run.engine.offline import run_offline

        run = run_offline(self.llm.engine, group, PLAIN)
        self.plain.append(run.metrics)
        return run

    def _compare(
        self, first: int, group: Sequence[OfflineRequest], run: OfflineRun, plain: OfflineRun
    ) -> None:
        """Compares a group that is done, and prints it where JSON is wanted."""
        from eagle_run.bench.mismatch import find_mismatch

        for place, (request, output) in enumerate(zip(group, run.outputs, strict=True)):
            comparable = self.speculative.acceptance is AcceptanceRule.TOPK or request.params.temperature == 0
            mismatch = None
            if comparable:
                mismatch = find_mismatch(
                    self.llm.engine, request, plain.token_ids[place], run.token_ids[place]
                )
            if mismatch:
                self.mismatches += 1
                self.faults += not mismatch.tie
                note(_explain(first + place, mismatch))
            if self.as_json:
                answer = Answer()
                answer.add(output)
                comparison = _compared(run.metrics, plain.metrics, mismatch, comparable=comparable)
                _write_json({**self._report(first + place, answer), "compare": comparison})

    def _report(self, number: int, answer: Answer) -> dict[str, Any]:
        """One answer in JSON."""
        bundle = self.llm.engine.bundle
        assert bundle is not None  # an LLM has one
        return {
            "index": number,
            "bundle": bundle.manifest.name,
            "tree": spec_of(self.speculative.tree),
            "draft": str(self.speculative.acceptance),
            "prompt_tokens": len(self.requests[number].prompt_token_ids),
            "text": answer.text,
            "tokens": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "statistics": answer.metrics.as_dict(),
        }

    def summary(self) -> str:
        """The line of statistics."""
        metrics = total_metrics(self.metrics)
        parts = [
            f"{metrics.tokens} tokens at {metrics.tokens_per_second:.1f} tokens/s",
            f"{metrics.tokens_per_round:.2f} tokens per round over {metrics.rounds} rounds",
            f"prompt {metrics.prompt_tokens} tokens in {metrics.prefill_seconds:.2f} s",
            describe(self.speculative.tree),
        ]
        if self.compare and self.plain and len(self.plain) == len(self.metrics):
            rate = total_metrics(self.plain).tokens_per_second
            parts.append(f"speed-up {metrics.tokens_per_second / rate:.2f}x over plain decoding ({rate:.1f})")
            if self.mismatches:
                parts.append(f"{self.mismatches} answers DIFFER from plain decoding")
            elif self.speculative.acceptance is AcceptanceRule.TOPK:
                parts.append("tokens identical to plain decoding")
        return " | ".join(parts)


def _compared(
    metrics: Metrics, plain: Metrics, mismatch: Mismatch | None, *, comparable: bool
) -> dict[str, Any]:
    """`identical` is None for sampled drafts at T > 0: other coins, so only the law is the same."""
    return {
        "plain_tokens_per_second": round(plain.tokens_per_second, 3),
        "speedup": round(metrics.tokens_per_second / plain.tokens_per_second, 4),
        "identical": mismatch is None if comparable else None,
        "mismatch": mismatch.as_dict() if mismatch else None,
    }


def _explain(index: int, mismatch: Mismatch) -> str:
    where = f"answer {index} differs from plain decoding at token {mismatch.position}"
    if mismatch.gap is None:
        return f"{where}: one of them ends there"
    kind = "a tie that rounding decided" if mismatch.tie else "NOT a tie: please report this"
    return f"{where}: {mismatch.speculative} instead of {mismatch.plain}, gap {mismatch.gap:.1e} ({kind})"
