"""Two small tokenizers, one of each kind of decoder, and a slow way to stream through one."""

from __future__ import annotations

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from eagle_run.detokenizer import Detokenizer
from eagle_run.tokenizer import Tokenizer
from support.bundlemaker import byte_tokenizer

WORDS = "naïve 🙂👩‍👩‍👧 日本語 \ufffd a\n\n1. b"


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte, valid UTF-8 or not: the alphabet of byte-level tokenizers maps bytes to letters."""
    table = {bytes([b]): letter for b, letter in zip(range(256), sorted_alphabet(), strict=True)}
    return [tokenizer.backend_tokenizer.token_to_id(table[bytes([b])]) for b in data]


def sorted_alphabet() -> list[str]:
    """Letter of byte 0, 1, ...: printable bytes stand for themselves, the others for 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def fallback_tokenizer() -> Tokenizer:
    """SentencePiece style, as Llama 2 and Vicuna: ▁ for blanks, <0xNN> for what the vocabulary lacks."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁hello",
        "▁world",
        "a",
        "b",
        "1",
        ".",
    ]
    tokenizer = BackendTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(tokenizer)


BYTES = Tokenizer(byte_tokenizer())
FALLBACK = fallback_tokenizer()


def stream(tokenizer: Tokenizer, ids: list[int], size: int = 1, **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]
