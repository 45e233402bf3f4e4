"""Opens a target for large batches: its source weights as torch modules, or the ONNX graph of a bundle.

Both run in the runtime's own decoder, without a draft: with many answers side by side a draft gains nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export.checkpoints.weights import read_config
from eagle_export.device import device_named, multiplies_bf16
from eagle_export.reference import recipe as recipes
from eagle_run.backends.environment import thread_count
from eagle_run.decoding.config import PLAIN
from eagle_run.engine.engine import Engine
from eagle_run.engine.model_runner import ModelRunner
from eagle_run.engine.offline import OfflineRequest, run_offline
from eagle_run.engine.validation import EngineLimits
from eagle_run.errors import EagleError, UsageError
from eagle_run.outputs import RequestOutput
from eagle_run.tokenizer import Tokenizer

if TYPE_CHECKING:
    from eagle_run.bundle.loading import Bundle

_CHUNK = 256  # most prompt tokens in one forward
_ROW_STEP = 64


@dataclass(frozen=True)
class GeneratorOptions:
    """Where and how the target runs. precision: of source weights, "" for the best of the device."""

    device: str = "auto"
    precision: str = ""
    batch: int = 64
    threads: int = 0


@dataclass
class Reply:
    """The tokens of an answer (with the stop token, if it came to one), and why it ended."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class Generator:
    """A target that answers. `target` and `tokenizer` are its identities, as data.json has them."""

    engine: Engine
    text: Tokenizer
    stop_token_ids: frozenset[int]
    target: dict[str, Any]
    tokenizer: dict[str, Any]
    backend: str

    @property
    def max_seq_len(self) -> int:
        return self.engine.limits.max_seq_len

    def run(self, requests: Sequence[OfflineRequest], on_tokens: Callable[[int], None]) -> list[Reply]:
        """All replies, in the order of the requests; `on_tokens` is told how many tokens came.

        Greedy requests go first, by themselves: where no slot of a batch samples, a step needs no
        probabilities, which on a CPU take a third of it. Requests of like lengths run side by side, as the
        width that is attended to is that of the longest. None of that changes a reply.
        """
        replies = [Reply() for _ in requests]
        for greedy in (True, False):
            chosen = [i for i, each in enumerate(requests) if (each.params.temperature == 0) == greedy]
            chosen.sort(key=lambda i: len(requests[i].prompt_token_ids))

            def take(number: int, output: RequestOutput, order: list[int] = chosen) -> None:
                reply, completion = replies[order[number]], output.outputs[0]
                on_tokens(len(completion.token_ids) - len(reply.tokens))
                reply.tokens, reply.finish_reason = list(completion.token_ids), completion.finish_reason

            run_offline(self.engine, [requests[i] for i in chosen], PLAIN, on_output=take)
        return replies


def open_generator(
    target: str, options: GeneratorOptions, max_seq_len: int, log: Callable[[str], None]
) -> Generator:
    """`target` is what `build` takes, or the folder of a bundle. `max_seq_len` tokens a conversation.

    `log` is told what the user should know. Raises UsageError for a name that means nothing and for more
    threads than cores, and EagleError for what cannot be loaded or is too long.
    """
    thread_count(options.threads)
    if os.path.isfile(Path(target) / "manifest.json"):  # any word, however long
        return _of_bundle(target, options, max_seq_len, log)
    return _of_source(target, options, max_seq_len)


def _of_bundle(
    path: str, options: GeneratorOptions, max_seq_len: int, log: Callable[[str], None]
) -> Generator:
    from eagle_run.bundle.loading import load_bundle
    from eagle_run.engine.graph_loading import load_graphs

    if options.precision:
        raise UsageError("a bundle has its precision", hint="leave it out", parameters=["precision"])
    bundle = load_bundle(path)
    limits = bundle.manifest.limits
    if max_seq_len > limits.max_seq_len:
        raise UsageError(
            f"max_seq_len {max_seq_len} passes the {limits.max_seq_len} tokens of this bundle",
            hint=f"give {limits.max_seq_len} or less",
            parameters=["max_seq_len"],
        )
    loaded = load_graphs(bundle, device=options.device, threads=options.threads, with_draft=False, log=log)
    if loaded.backend != "onnxruntime" and options.batch > limits.max_batch:
        raise UsageError(
            f"batch {options.batch} passes the {limits.max_batch} that the engines were compiled for",
            hint="give a smaller one, or the model's folder or recipe in place of the bundle",
            parameters=["batch"],
        )
    runner = ModelRunner(loaded.graphs, batch=options.batch, device=loaded.device, precision=loaded.precision)
    text = Tokenizer.load(bundle.tokenizer_dir)
    bundle.check_unchanged()
    return Generator(
        engine=Engine(  # a second pool of threads would only be in the way of ONNX Runtime's
            runner,
            EngineLimits(max_seq_len, limits.prefill_chunk),
            tokenizer=text,
            single_thread=loaded.backend == "onnxruntime",
        ),
        text=text,
        stop_token_ids=frozenset(bundle.manifest.stop_token_ids),
        target=_bundle_target(bundle),
        tokenizer=identity(text),
        backend=f"{loaded.backend} {loaded.precision} on {loaded.device}",
    )


def _bundle_target(bundle: Bundle) -> dict[str, Any]:
    info = bundle.manifest.target
    return {
        "name": info.name,
        "source": info.source,
        "sha256": info.sha256,
        "vocab_size": info.vocab_size,
    }


def _of_source(target: str, options: GeneratorOptions, max_seq_len: int) -> Generator:
    from eagle_export.reference.modules import DTYPES, eager_graphs, load_config, load_modules
    from eagle_run.backends.stream import on_stream

    device = device_named(options.device)
    found = recipes.resolve_target(target)
    config = load_config(found, max_seq_len)
    precision = options.precision or ("bf16" if multiplies_bf16(device) else "fp32")
    modules = load_modules(found, None, DTYPES[precision])
    modules.target.to(device)
    chunk = min(_CHUNK, max_seq_len)
    rows = -(-(max_seq_len + chunk) // _ROW_STEP) * _ROW_STEP
    with on_stream(device):
        runner = ModelRunner(
            eager_graphs(modules, rows), batch=options.batch, device=str(device), precision=precision
        )
    text = load_text(found.folder)
    return Generator(
        engine=Engine(runner, EngineLimits(max_seq_len, chunk), tokenizer=text),
        text=text,
        stop_token_ids=_stop_token_ids(text, found.folder, config.vocab_size),
        target={
            "name": found.name,
            "source": found.source,
            "sha256": found.sha256,
            "vocab_size": config.vocab_size,
        },
        tokenizer=identity(text),
        backend=f"torch {precision} on {device}",
    )


def load_text(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; one without tokenizer.json is converted by Transformers."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.load(folder)
    from transformers import AutoTokenizer

    try:
        with tempfile.TemporaryDirectory() as temporary:
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(temporary)
            return Tokenizer.load(temporary)
    except (OSError, ValueError) as error:
        raise EagleError(
            f"{folder}: no readable tokenizer: {error}",
            hint="the folder must hold tokenizer.json (or tokenizer.model) and tokenizer_config.json",
        ) from error


def _stop_token_ids(text: Tokenizer, folder: Path, vocab_size: int) -> frozenset[int]:
    """As a build finds them: the generation config's or tokenizer's, else those of config.json."""
    ids = list(text.eos_token_ids)
    if not ids:
        eos = read_config(folder).get("eos_token_id")
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def identity(text: Tokenizer) -> dict[str, Any]:
    """What a tokenizer is, however its files are written: hashes of vocabulary and chat template."""
    vocabulary = sorted(text.backend_tokenizer.get_vocab(with_added_tokens=True).items())
    template = text.chat_template or ""
    return {
        "vocabulary_sha256": hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
    }
