"""The source weights of a bundle as torch modules: what is traced, and what everything is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_export.checkpoints import weights, whereabouts
from eagle_export.checkpoints.stored import stored_tensor_of
from eagle_export.checkpoints.weight_stream import InMemory, Weight
from eagle_export.heads.load import LoadedHead, load_head
from eagle_export.heads.settings import UNSAID, HeadSettings, parse_settings
from eagle_export.models.families import FAMILIES, TEXT_PARTS, check_family, family_of, text_part
from eagle_export.models.target import TargetModule, load_target, target_dims
from eagle_export.reference import recipe as recipes
from eagle_run.backends.base import Graph
from eagle_run.bundle.manifest import HeadInfo, Manifest, TargetInfo
from eagle_run.dtypes import BY_PRECISION
from eagle_run.errors import EagleError, first_line

if TYPE_CHECKING:
    from eagle_export.models.head import Draft, Fuse
    from eagle_export.reference.recipe import ResolvedHead, ResolvedTarget

DTYPES = {name: dtype.torch for name, dtype in BY_PRECISION.items() if name != "fp8"}  # of modules


@dataclass(frozen=True, eq=False)
class Modules:
    """Target and head as eager modules that share the target's embedding and lm_head.

    `model` is the Transformers model inside `target`. Without a head, `fuse`, `draft` and `draft_to_target`
    are None. `weights`: where the modules are without weights (on the meta device), what belongs in those of
    each graph, by name.
    """

    model: Any
    target: TargetModule
    fuse: Fuse | None
    draft: Draft | None
    draft_to_target: Tensor | None
    weights: Mapping[str, Mapping[str, Weight]] = field(default_factory=dict)


def load_config(target: ResolvedTarget, max_seq_len: int) -> Any:
    """The Transformers config of a target whose family can be exported for `max_seq_len` tokens.

    Raises EagleError for an unknown family and for what the target graph would compute wrongly.
    """
    from transformers import AutoConfig

    raw = weights.read_config(target.folder)
    if raw.get("model_type") not in {*FAMILIES, *TEXT_PARTS}:  # Transformers may not even know it
        family_of(SimpleNamespace(model_type=raw.get("model_type")))
    try:
        config = text_part(AutoConfig.from_pretrained(target.folder, trust_remote_code=False))
    except Exception as error:  # whatever Transformers makes of a damaged file
        raise EagleError(
            f"{target.folder / 'config.json'}: Transformers cannot read it: {first_line(error)}",
            hint="download the model again",
        ) from error
    check_family(config, max_seq_len)
    return config


def load_fitting_head(head: ResolvedHead, config: Any, settings: HeadSettings = UNSAID) -> LoadedHead:
    """The head's checkpoint, checked against the target's config; `settings` go over what a recipe says.

    Raises EagleError when it does not fit.
    """
    loaded = load_head(head.folder, target_dims(config), settings.over(head.settings))
    if head.algorithm is not None and loaded.spec.algorithm != head.algorithm:
        raise EagleError(
            f"{head.folder} is an {loaded.spec.algorithm} head, but the recipe calls it {head.algorithm}",
            hint="correct the recipe, or give the head's folder",
            parameters=["head"],
        )
    return loaded


def load_modules(
    target: ResolvedTarget, loaded: LoadedHead | None, dtype: torch.dtype, max_seq_len: int | None = None
) -> Modules:
    """Reads the weights. Raises EagleError when the checkpoint does not hold exactly the model's tensors.

    max_seq_len: see TargetModule.
    """
    return _join(load_target(target.folder, dtype), loaded, dtype, max_seq_len)


def _join(model: Any, loaded: LoadedHead | None, dtype: torch.dtype, max_seq_len: int | None) -> Modules:
    # Without a head nothing reads the features; the last layer's cost nothing.
    layers = loaded.spec.feature_layers if loaded else (model.config.num_hidden_layers,)
    module = TargetModule(model, layers, max_seq_len).eval()
    if loaded is None:
        return Modules(model, module, None, None, None)
    from eagle_export.models.head import build_head

    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    fuse, draft = build_head(loaded, embedding, lm_head, dtype=dtype)
    return Modules(model, module, fuse, draft, loaded.draft_to_target)


def load_hollow(
    target: ResolvedTarget, loaded: LoadedHead | None, dtype: torch.dtype, max_seq_len: int
) -> Modules:
    """`load_modules` for an export: the same checks, but no weight of the target is read."""
    from eagle_export.models.recorded import Recorded
    from eagle_export.models.skeleton import hollow, load_recorded

    model = load_recorded(target.folder, dtype)
    empty = None
    if loaded is not None:
        held = {name: stored_tensor_of(tensor) or InMemory(tensor) for name, tensor in loaded.tensors.items()}
        empty = replace(loaded, tensors={name: Recorded(weight) for name, weight in held.items()})
    modules = _join(model, empty, dtype, max_seq_len)
    parts = {"target": modules.target.model, "fuse": modules.fuse, "draft": modules.draft}
    return replace(modules, weights={name: hollow(part) for name, part in parts.items() if part is not None})


def eager_graphs(modules: Modules, cache_rows: int) -> dict[str, Graph]:
    """The modules behind the runtime's Graph protocol, with caches of `cache_rows` rows."""
    from eagle_export.reference.eager import draft_graph, fuse_graph, target_graph

    graphs: dict[str, Graph] = {"target": target_graph(modules.target, cache_rows)}
    if modules.fuse is not None:
        graphs["fuse"] = fuse_graph(modules.fuse)
    if modules.draft is not None:
        graphs["draft"] = draft_graph(modules.draft, cache_rows)
    return graphs


def reference_of(
    manifest: Manifest, *, precision: str = "fp32", target: str | None = None, head: str | None = None
) -> Modules:
    """The modules that a bundle was exported from, in `precision` (a key of DTYPES).

    `target` and `head` name the sources as for a build; by default they are found by what the manifest says
    of them, and by where their identities were last seen on this machine. Raises EagleError when a source is
    not found, or is not the one that the bundle was built from.
    """
    resolved = recipes.resolve_target(target or _find_target(manifest))
    _check_same(manifest, "target", manifest.target.sha256, resolved.sha256, resolved.file)
    config = load_config(resolved, manifest.limits.max_seq_len)
    loaded = None
    if manifest.head is not None:
        source = recipes.resolve_head(head or _find_head(manifest, manifest.head, resolved), resolved)
        _check_same(manifest, "head", manifest.head.sha256, source.sha256, source.folder)
        loaded = load_fitting_head(source, config, settings_of(manifest.head))
    return load_modules(resolved, loaded, DTYPES[precision], manifest.limits.max_seq_len)


def settings_of(head: HeadInfo) -> HeadSettings:
    """How a bundle's head was read: the layers that it got, and what a person or a recipe said of it."""
    return replace(parse_settings(head.settings), layer_ids=head.feature_layers)


def _find_target(manifest: Manifest) -> str:
    """What a caller would name it by: the recipe of this name and source, or where the model is."""
    for known in recipes.list_recipes():
        if known.name == manifest.target.name and str(known.target) == manifest.target.source:
            return known.name
    return _find(manifest, "target", manifest.target)


def _find_head(manifest: Manifest, info: HeadInfo, target: ResolvedTarget) -> str:
    """What a caller would name it by: the recipe's word for it, or where it is."""
    for algorithm, source in target.recipe.heads.items():
        if str(source) == info.source:
            return algorithm
    return _find(manifest, "head", info)


def _find(manifest: Manifest, part: str, info: TargetInfo | HeadInfo) -> str:
    """The folder where a part's identity was last seen, else its hub id (or, as manifests once had it, the
    folder that it was built from)."""
    if (folder := whereabouts.recall(info.sha256)) is not None:
        return str(folder)
    if Path(info.source).is_absolute() and Path(info.source).is_dir():
        return info.source
    hub_id = info.source.partition("@")[0]
    if recipes.HUB_ID.fullmatch(hub_id):
        return hub_id
    raise EagleError(
        f"the {part} of bundle {manifest.name} was not found on this machine: {info.source}, "
        f"sha256 {info.sha256[:12]}…",
        hint="say where it is",
        parameters=[part],
    )


def _check_same(manifest: Manifest, part: str, expected: str, found: str, path: Path) -> None:
    if expected != found:
        raise EagleError(
            f"bundle {manifest.name} was built from another {part}: expected sha256 {expected[:12]}…, "
            f"found {found[:12]}… ({path})",
            hint=f"give the {part} it was built from, or build the bundle again",
            parameters=[part],
        )
