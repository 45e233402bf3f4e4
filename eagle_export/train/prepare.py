"""From what a user names to what a trainer takes: target, data, vocabulary, features, a first head."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_export.heads.load import LoadedHead
from eagle_export.heads.spec import HeadSpec, Tensors
from eagle_export.models.head import build_head
from eagle_export.models.target import load_target
from eagle_export.reference import recipe as recipes
from eagle_export.reference.modules import load_config, load_fitting_head
from eagle_export.train.features import BatchSource, Cached, OnTheFly, TargetFeatures, cache_files, fill_cache
from eagle_export.train.init import feature_layers, new_spec, random_weights, weights_from_target
from eagle_export.train.objective import Objective
from eagle_export.train.origin import check_origin
from eagle_export.train.samples import Samples, load_samples
from eagle_export.train.settings import TrainSettings
from eagle_export.train.vocab import DraftVocabulary, choose_vocabulary, vocabulary_of
from eagle_export.train.workers import Workers, autocast_type
from eagle_run.errors import UsageError

if TYPE_CHECKING:
    from eagle_export.progress import Progress


@dataclass(frozen=True)
class TrainRequest:
    """What to train, on what, and where to. init: "target", "random", or the folder of a head."""

    target: str
    data: tuple[Path, ...]
    out: Path
    settings: TrainSettings
    init: str = "target"
    features_cache: Path | None = None
    on_the_fly: bool = False
    resume: bool = False
    device: str = "auto"


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that training needs; spec and vocabulary are those of the head that comes out."""

    objective: Objective
    source: BatchSource
    samples: Samples
    spec: HeadSpec
    vocabulary: DraftVocabulary
    settings: TrainSettings
    target: recipes.ResolvedTarget
    config: Any

    @property
    def head_sha256(self) -> str:
        """Of what weights mean: the head's form and its vocabulary."""
        return hashlib.sha256(f"{self.spec} {self.vocabulary.ids.tolist()}".encode()).hexdigest()


def prepare(request: TrainRequest, workers: Workers, progress: Progress) -> Prepared:
    """Loads and checks everything. Features that the cache lacks are computed here."""
    settings = request.settings
    resolved = recipes.resolve_target(request.target)
    config = load_config(resolved, 64)  # the length is the training data's, see below
    if getattr(config, "final_logit_softcapping", None):
        raise UsageError(
            f"{resolved.source} has final_logit_softcapping: the loss knows no cap on the target's logits",
            hint="train the head with another trainer",
        )
    samples = load_samples(request.data, vocab_size=config.vocab_size, target_sha256=resolved.sha256)
    settings = replace(settings, max_length=min(settings.max_length, config.max_position_embeddings))
    if not samples.answered(settings.max_length):
        raise UsageError(
            f"no answers to learn from in the first {settings.max_length} tokens of the conversations",
            hint="allow longer ones, or give other data",
            parameters=["max_length", "data"],
        )
    start = None
    if request.init not in ("target", "random"):
        start = load_fitting_head(recipes.resolve_head(request.init, resolved), config)
        if start.spec.has_fuse and start.spec.feature_layers[-1] >= config.num_hidden_layers:
            raise UsageError(
                f"the head {request.init} reads the target's last layer (ids "
                f"{list(start.spec.feature_layers)}), expected ids below {config.num_hidden_layers}: heads "
                "that read it are exported, but not trained",
                hint='begin with "target" or "random"',
                parameters=["init"],
            )
        settings = _continued(settings, start)
    vocabulary = _vocabulary(samples, settings, config, start)
    spec = start.spec if start else new_spec(config, settings, len(vocabulary.ids))
    layers = feature_layers(settings, config.num_hidden_layers) if start is None else spec.feature_layers
    dtype = autocast_type(settings.precision, workers.device) or torch.float32
    with progress.step("loading target"):
        model = load_target(resolved.folder, dtype).to(workers.device).requires_grad_(False)
    target = TargetFeatures(model, layers)
    if workers.first:
        check_origin(samples, target, settings.max_length, progress.note)
    if request.on_the_fly:
        source: BatchSource = OnTheFly(samples, target, settings.max_length)
    else:
        folder = request.features_cache or request.out / "features"
        length = settings.max_length
        if workers.first:
            with progress.bar("target features") as show:
                fill_cache(folder, samples, resolved.sha256, target, show, max_length=length)
        workers.wait()
        files = cache_files(folder, samples, resolved.sha256, target, max_length=length)
        source = Cached(samples, files, layers, length)
    objective = _objective(
        model, spec=spec, vocabulary=vocabulary, settings=settings, start=start, init=request.init
    )
    return Prepared(objective, source, samples, spec, vocabulary, settings, resolved, config)


def _continued(settings: TrainSettings, start: LoadedHead) -> TrainSettings:
    """A head that is trained further decides what kind it is."""
    spec = start.spec
    if settings.layers is not None or settings.kv_heads is not None:
        raise UsageError(
            f"{start.folder} has its layers and heads",
            hint="leave out what it has",
            parameters=["layers", "kv_heads"],
        )
    if spec.layers != 1 or spec.target_hidden_size != spec.hidden_size or spec.own_embedding:
        raise UsageError(
            f"{start.folder}: only heads of one layer, with the target's width and embedding, are trained",
            hint="begin with the target's weights",
            parameters=["init"],
        )
    return replace(settings, algorithm=spec.algorithm, draft_vocab=spec.draft_vocab_size)


def _vocabulary(
    samples: Samples, settings: TrainSettings, config: Any, start: LoadedHead | None
) -> DraftVocabulary:
    if start is not None and start.spec.algorithm == "eagle3":
        return vocabulary_of(start.draft_to_target, samples, config.vocab_size)
    stop = config.eos_token_id
    stops = [stop] if isinstance(stop, int) else list(stop or ())
    return choose_vocabulary(samples, settings.draft_vocab, config.vocab_size, always=stops)


def _objective(
    model: Any,
    *,
    spec: HeadSpec,
    vocabulary: DraftVocabulary,
    settings: TrainSettings,
    start: LoadedHead | None,
    init: str,
) -> Objective:
    embedding = model.get_input_embeddings().weight
    lm_head = model.get_output_embeddings().weight
    if start is not None:
        tensors: Tensors = {name: tensor.float() for name, tensor in start.tensors.items()}
    elif init == "target":
        tensors = weights_from_target(spec, model, vocabulary.ids.to(lm_head.device), settings.seed)
    else:
        tensors = random_weights(spec, settings.seed)
    loaded = LoadedHead(Path(), spec, tensors, vocabulary.ids)
    wide = [weight.detach().to("cpu", torch.float32) for weight in (embedding, lm_head)]
    fuse, draft = build_head(loaded, *wide)
    rows: Tensor = wide[1][vocabulary.ids].clone()
    if settings.freeze_lm_head:
        draft.lm_head.weight.requires_grad_(False)
    for module in (fuse, draft):
        if module is not None:
            module.train()
    return Objective(fuse, draft, rows, vocabulary.own(), settings)


def head_tensors(prepared: Prepared) -> Tensors:
    """The weights of the head as a checkpoint has them: without what is the target's."""
    objective = prepared.objective
    tensors = dict(objective.draft.state_dict())
    if objective.fuse is not None:
        tensors |= objective.fuse.state_dict()
    if not prepared.spec.own_embedding:
        tensors.pop("embed_tokens.weight")
    if not prepared.spec.own_lm_head:
        tensors.pop("lm_head.weight")
    return tensors
