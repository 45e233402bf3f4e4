"""The FP8 part of a build: where the scales come from, and what is quantised. How it is done is in fp8/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from eagle_export.checkpoints import weights
from eagle_export.checkpoints.fp8_scales import starred
from eagle_export.pipeline.partial import Partial
from eagle_export.pipeline.plan import Plan
from eagle_export.progress import Progress
from eagle_run.errors import EagleError, UsageError

if TYPE_CHECKING:
    from eagle_export.checkpoints.fp8_checkpoint import Checkpoint
    from eagle_export.checkpoints.fp8_scales import Scales
    from eagle_export.graphs.export import Rewrite
    from eagle_export.quantize.fp8.rewrite import Quantized
    from eagle_export.quantize.fp8.sensitivity import Cost

SCALES_FILE = "fp8_scales.json"


@dataclass(frozen=True, eq=False)
class Quantization:
    """All scales that are known, those that were chosen, and the FP8 checkpoint that the target comes from
    (None: weights are quantised here). `done` fills as graphs are rewritten, by graph."""

    known: Scales
    chosen: Scales
    checkpoint: Checkpoint | None
    done: dict[str, Quantized] = field(default_factory=dict)

    @property
    def linears(self) -> int:
        """Linear layers that are in FP8 in the graphs written so far."""
        return sum(len(result.linears) for result in self.done.values())

    @property
    def kept_along(self) -> list[str]:
        """Layers that stayed in 16 bit only because others of their merged product did."""
        return [layer for result in self.done.values() for layer in result.kept_along]

    def rewrite(self, graph: str) -> Rewrite | None:
        """What quantises the graph when it is exported; None if nothing in it is quantised."""
        from eagle_export.quantize.fp8.rewrite import quantize

        inputs = self.chosen.inputs.get(graph)
        if inputs is None:
            return None
        checkpoint = self.checkpoint if graph == "target" else None

        def rewrite(model: Any) -> None:
            self.done[graph] = quantize(model, inputs, checkpoint)

        return rewrite


def find_quantization(plan: Plan, tokenizer: Path, progress: Progress, journal: Partial) -> Quantization:
    """Scales for a build in FP8: those of the target's own FP8 checkpoint, of a file, or from calibration.

    `tokenizer` is the bundle's tokenizer folder, whose chat template the calibration prompts go through.
    `journal` keeps what a calibration found for the next run.
    Raises EagleError when scales belong to other weights, or when activations pass the 16-bit type.
    """
    from eagle_export.checkpoints.fp8_checkpoint import read_checkpoint
    from eagle_export.checkpoints.fp8_scales import Scales, choose
    from eagle_export.models.families import expert_count

    checkpoint = read_checkpoint(plan.target.folder)
    for note in () if checkpoint is None else checkpoint.notes:
        progress.note(f"note: {note}")
    if experts := expert_count(plan.config):
        progress.note(f"note: the weights of the {experts} experts of a layer stay in {plan.dtype}")
        checkpoint = _without_experts(checkpoint)
    head_sha256 = None if plan.head is None else plan.head.sha256
    scales: Scales | None
    if plan.fp8.scales is not None:
        scales = Scales.load(plan.fp8.scales)
        scales.check_identity(plan.target.sha256, head_sha256)
        scales = _of_these_graphs(scales, plan)
    elif checkpoint is not None and checkpoint.static and plan.loaded is None:
        scales = None  # everything is in the checkpoint
    else:
        scales = _calibrated(plan, tokenizer, progress, journal)
    if checkpoint is not None:
        scales = replace(checkpoint.join(scales), target_sha256=plan.target.sha256)
    assert scales is not None
    for note in scales.check_range(plan.dtype):
        progress.note(f"note: {note}")
    chosen = choose(scales, plan.fp8.keep, _also(plan))
    if "lm_head" in chosen.inputs.get("target", {}) and plan.config.tie_word_embeddings:
        progress.note("note: the target's lm_head shares its weight with the embedding and stays in 16 bit")
        chosen = _without(chosen, "target", "lm_head")
    return Quantization(scales, chosen, checkpoint)


def _without_experts(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """What of an FP8 checkpoint stays in FP8: its experts are dequantised."""
    if checkpoint is None:
        return None
    layers = {name: layer for name, layer in checkpoint.layers.items() if ".experts." not in name}
    return replace(checkpoint, layers=layers)


def check_fp8(plan: Plan) -> None:
    """Raises as `find_quantization` does for scales and patterns that do not fit: before a calibration."""
    from eagle_export.checkpoints.fp8_scales import Scales, choose

    if plan.precision != "fp8":
        return
    if plan.fp8.scales is not None:
        scales = Scales.load(plan.fp8.scales)
        scales.check_identity(plan.target.sha256, None if plan.head is None else plan.head.sha256)
        choose(_of_these_graphs(scales, plan), plan.fp8.keep, _also(plan))
    elif names := _layer_names(plan):
        for pattern in plan.fp8.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = sorted({starred(name) for name in names if name.endswith("_proj")})
                raise UsageError(
                    f"no linear layer is called {pattern!r}",
                    hint="there are " + ", ".join(shown),
                    parameters=["keep"],
                )


def _also(plan: Plan) -> list[str]:
    """Products that are quantised only when they are asked for."""
    asked = {"lm_head": plan.fp8.lm_head, "fc": plan.fp8.fuse}
    return [name for name, wanted in asked.items() if wanted]


def _layer_names(plan: Plan) -> set[str]:
    """Of all weights, also without prefixes that a checkpoint may have; empty where no header says them."""
    paths = [path for path in weights.model_files(plan.target.folder) if path.suffix == ".safetensors"]
    stored = [name for path in paths for name in weights.read_header(path)]
    if not stored:
        return set()
    stored += () if plan.loaded is None else plan.loaded.tensors
    parts = [name.removesuffix(".weight").split(".") for name in stored if name.endswith(".weight")]
    return {".".join(part[i:]) for part in parts for i in range(len(part))}


def _of_these_graphs(scales: Scales, plan: Plan) -> Scales:
    """The scales of the graphs that this build has. Raises EagleError where those of a whole graph lack."""
    needed = ["target"] if plan.loaded is None else ["target", "draft"]
    for graph in needed:
        if not scales.inputs.get(graph):
            raise EagleError(
                f"{plan.fp8.scales}: expected scales of {' and '.join(needed)}, found "
                f"{', '.join(scales.inputs) or 'none'}",
                hint="calibrate again: build without a file of scales",
                parameters=["scales"],
            )
    graphs = (*needed, "fuse") if plan.loaded is not None else needed
    return replace(scales, inputs={name: scales.inputs[name] for name in graphs if name in scales.inputs})


def _without(scales: Scales, graph: str, layer: str) -> Scales:
    layers = {name: scale for name, scale in scales.inputs[graph].items() if name != layer}
    return replace(scales, inputs={**scales.inputs, graph: layers})


def _calibrated(plan: Plan, tokenizer: Path, progress: Progress, journal: Partial) -> Scales:
    """What a calibration finds, or found in a run that was interrupted later."""
    from eagle_export.checkpoints.fp8_scales import Scales

    step = "calibrate fp8"
    if (recalled := journal.recall(step)) is not None:
        return TypeAdapter(Scales).validate_python(recalled.facts)
    scales = _calibrate(plan, tokenizer, progress)
    journal.record(step, facts=asdict(scales))
    return scales


def _calibrate(plan: Plan, tokenizer_folder: Path, progress: Progress) -> Scales:
    from eagle_export.quantize.fp8.calibrate import calibrate, encode
    from eagle_export.reference.modules import DTYPES, load_modules
    from eagle_run.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder)
    most = plan.limits.max_seq_len
    prompts = [ids[:most] for ids in encode(tokenizer, _questions(plan.fp8.prompts))]
    with progress.step("load the weights in fp32"):
        modules = load_modules(plan.target, plan.loaded, DTYPES["fp32"])
    with progress.bar("calibrate fp8") as update:
        return calibrate(
            modules,
            prompts,
            shape=None if plan.tree is None else plan.tree.shape(),
            stop_tokens=tokenizer.eos_token_ids,
            target_sha256=plan.target.sha256,
            head_sha256=None if plan.head is None else plan.head.sha256,
            on_progress=lambda done, total: update(done / total, f"prompt {done}"),
        )


def find_costs(target: str, prompts: Path | None, scales_file: Path | None, progress: Progress) -> list[Cost]:
    """What each product of a target loses in FP8, the dearest first. `target` as for a build."""
    from eagle_export.checkpoints.fp8_scales import Scales, choose
    from eagle_export.quantize.fp8.calibrate import calibrate, encode
    from eagle_export.quantize.fp8.sensitivity import PROMPT_COUNT, sensitivity
    from eagle_export.reference import recipe
    from eagle_export.reference.modules import DTYPES, load_modules
    from eagle_run.tokenizer import Tokenizer

    with progress.step("find the weights"):
        resolved = recipe.resolve_target(target)
    with progress.step("load the weights in fp32"):
        modules = load_modules(resolved, None, DTYPES["fp32"])
    tokenizer = Tokenizer.load(resolved.folder)
    ids = encode(tokenizer, _questions(prompts))
    if scales_file is None:
        with progress.bar("calibrate fp8") as update:
            scales = calibrate(
                modules,
                ids,
                stop_tokens=tokenizer.eos_token_ids,
                on_progress=lambda done, total: update(done / total, f"prompt {done}"),
            )
    else:
        scales = Scales.load(scales_file)
        scales.check_identity(resolved.sha256, None)
    with progress.bar("quantise each product alone") as update:
        return sensitivity(
            modules,
            choose(scales),
            ids if prompts else ids[:PROMPT_COUNT],
            stop_tokens=tokenizer.eos_token_ids,
            on_progress=lambda done, total: update(done / total, f"{done} of {total}"),
        )


def _questions(prompts: Path | None) -> Sequence[str]:
    from eagle_export.prompts import PROMPTS
    from eagle_export.quantize.fp8.calibrate import PROMPT_COUNT
    from eagle_run.datasets import read_questions

    if prompts is None:
        return PROMPTS[:PROMPT_COUNT]
    return [question.turns[0] for question in read_questions(prompts)]
