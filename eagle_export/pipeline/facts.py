"""What the manifest says of a build: target, head, quantisation, stop tokens, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_export.pipeline.plan import Plan
from eagle_export.pipeline.quantization import SCALES_FILE, Quantization
from eagle_export.pipeline.writer import BundleWriter
from eagle_run.bundle.manifest import HeadInfo, TargetInfo
from eagle_run.bundle.records import QuantizationInfo

if TYPE_CHECKING:
    from eagle_export.heads.load import LoadedHead

_VERSIONS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu")


def library_versions() -> dict[str, str]:
    """Versions of what took part in a build. ONNX Runtime goes by one of two names, so some are absent."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def quantization_info(plan: Plan, quantization: Quantization, writer: BundleWriter) -> QuantizationInfo:
    """What the manifest says of FP8; writes the scales beside it, for the next build of these weights."""
    scales = quantization.known
    scales.save(writer.file(SCALES_FILE))
    return QuantizationInfo(
        source=scales.source,  # type: ignore[arg-type]
        base=plan.dtype,  # type: ignore[arg-type]
        tokens=scales.tokens,
        linears=quantization.linears,
        kept=quantization.chosen.kept,
        scales=writer.entry(SCALES_FILE),
    )


def target_info(plan: Plan) -> TargetInfo:
    from eagle_export.models.target import target_dims

    dims = target_dims(plan.config)
    return TargetInfo(
        name=plan.target.name,
        family=plan.config.model_type,
        source=plan.target.source,
        sha256=plan.target.sha256,
        layers=dims.layers,
        hidden_size=dims.hidden_size,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        vocab_size=dims.vocab_size,
    )


def head_info(plan: Plan, writer: BundleWriter) -> HeadInfo | None:
    """The head's identity and sizes; writes its vocabulary map unless draft ids are target ids."""
    if plan.head is None or plan.loaded is None:
        return None
    spec, table = plan.loaded.spec, plan.loaded.draft_to_target
    return HeadInfo(
        algorithm=spec.algorithm,  # type: ignore[arg-type]
        dialect=spec.dialect,
        source=plan.head.source,
        sha256=plan.head.sha256,
        target_sha256=plan.target.sha256,
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        draft_vocab_size=spec.draft_vocab_size,
        feature_layers=spec.feature_layers,
        settings=plan.loaded.settings.texts(),
        vocab_map=None if same_vocabulary(plan.loaded) else writer.write_vocab_map(table),
    )


def same_vocabulary(loaded: LoadedHead) -> bool:
    """Whether draft ids are target ids, so that no map is needed."""
    return loaded.draft_to_target.tolist() == list(range(loaded.spec.vocab_size))


def stop_tokens(plan: Plan, folder: Path) -> tuple[int, ...]:
    """Where answers end: the generation config's eos_token_id, else the tokenizer's, else the config's."""
    from eagle_run.tokenizer import Tokenizer

    ids = Tokenizer.load(folder / "tokenizer").eos_token_ids
    if not ids:
        eos = getattr(plan.config, "eos_token_id", None)
        ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(sorted({token for token in ids if 0 <= token < plan.config.vocab_size}))
