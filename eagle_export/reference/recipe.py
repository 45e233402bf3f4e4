"""Recipes: what to build for a target, in YAML; and what else a target or a head may be named by."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from eagle_export.checkpoints import weights, whereabouts
from eagle_export.heads.settings import UNSAID, HeadSettings
from eagle_run.bundle.manifest import TreeDefaults
from eagle_run.bundle.records import Record, explain
from eagle_run.errors import EagleError, UsageError
from eagle_run.json_files import check_nesting, read_bytes

Algorithm = Literal["eagle1", "eagle3"]
Count = Annotated[int, Field(ge=1)]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PAPER_TREE = TreeDefaults(kind="dynamic", depth=8, top_k=10, nodes=60)
_DEFAULT_CONTEXT = 4096
_RECIPE_BYTES = 1 << 20  # a recipe takes 500; YAML is read at some 100 kB a second


class Source(Record):
    """Where weights come from.

    hub            `id` on the model hub, optionally at a `revision`
    folder         `path`, relative to the recipe's file
    gguf-package   `file` inside the installed Python `package` of that `version`
    """

    kind: Literal["hub", "folder", "gguf-package"]
    id: str | None = None
    revision: str | None = None
    path: str | None = None
    package: str | None = None
    version: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Source:
        needed = {"hub": {"id"}, "folder": {"path"}, "gguf-package": {"package", "version", "file"}}[
            self.kind
        ]
        given = {key for key in Source.model_fields if key != "kind" and getattr(self, key) is not None}
        if absent := sorted(needed - given):
            raise ValueError(f"a source of kind {self.kind} needs {', '.join(absent)}")
        if extra := sorted(given - needed - ({"revision"} if self.kind == "hub" else set())):
            raise ValueError(f"a source of kind {self.kind} takes no {', '.join(extra)}")
        return self

    def __str__(self) -> str:
        """As a manifest has it: nothing of this machine's folders."""
        if self.kind == "gguf-package":
            return f"{self.package}=={self.version}/{self.file}"
        if self.kind == "folder":
            return whereabouts.told(str(self.path))
        return f"{self.id}@{self.revision}" if self.revision else str(self.id)


class HeadSource(Source):
    """A head's weights, and what its config.json does not say, or says wrongly: see HeadSettings."""

    layer_ids: tuple[int, ...] | None = None
    rope_theta: float | None = None
    rope_scaling: Literal["none"] | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    norm_hidden_twice: bool | None = None

    @property
    def settings(self) -> HeadSettings:
        return HeadSettings(**{field.name: getattr(self, field.name) for field in fields(HeadSettings)})


class BuildLimits(Record):
    """Sizes the graphs are built for; tokens, sequences, tokens, nodes (root included)."""

    max_seq_len: Count
    max_batch: Count = 4
    prefill_chunk: Count = 512
    max_tree_nodes: Count = 64


class Recipe(Record):
    """One target: its weights, its heads by algorithm, and defaults for tree and sizes."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    description: str
    target: Source
    heads: dict[Algorithm, HeadSource] = Field(default_factory=dict)
    tree: TreeDefaults = _PAPER_TREE
    limits: BuildLimits

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.tree.nodes > self.limits.max_tree_nodes:
            raise ValueError(
                f"a tree of {self.tree.nodes} nodes passes max_tree_nodes {self.limits.max_tree_nodes}"
            )
        return self


@dataclass(frozen=True)
class ResolvedTarget:
    """A target whose files are here: `folder` is a Hugging Face model folder, made of `file` or the same."""

    name: str
    source: str
    folder: Path
    file: Path
    recipe: Recipe
    recipe_dir: Path

    @cached_property
    def sha256(self) -> str:
        """Identity of the weights: the first time they are all read."""
        return whereabouts.identify(self.file)


@dataclass(frozen=True)
class ResolvedHead:
    """A head whose files are here. `algorithm` and `settings` are known only when the recipe named it."""

    source: str
    folder: Path
    algorithm: Algorithm | None
    settings: HeadSettings = UNSAID

    @cached_property
    def sha256(self) -> str:
        """Identity of the weights, as of a target's."""
        return whereabouts.identify(self.folder)


def recipes_dir() -> Path:
    """The recipes of this installation: inside a wheel, or at the root of a source checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_recipes"
    return packaged if packaged.is_dir() else package.parent / "recipes"


def list_recipes() -> list[Recipe]:
    """Every recipe of this installation, by name."""
    return [_read(path) for path in sorted(recipes_dir().glob("*.yaml"))]


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe by name, or a YAML file of one.

    Raises UsageError for an unknown name; EagleError, naming file and key, for a faulty file.
    """
    return _read(_find(str(name_or_path)))


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):
            raise UsageError(f"{name}: no such recipe file")
        return Path(name)
    known = _names()
    if name in known:
        return recipes_dir() / f"{name}.yaml"
    raise UsageError(f"unknown recipe {name!r}", hint=_suggest(name, known))


def _names() -> list[str]:
    return sorted(path.stem for path in recipes_dir().glob("*.yaml"))


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}? `eagle-export recipes` lists all"
    return f"known recipes: {', '.join(known)}"


def _read(path: Path) -> Recipe:
    try:
        data = yaml.safe_load(read_bytes(path, max_bytes=_RECIPE_BYTES).decode("utf-8-sig"))
    except (ValueError, yaml.YAMLError) as error:
        raise EagleError(f"{path}: not readable as YAML: {error}") from None
    except RecursionError:
        raise EagleError(f"{path}: not readable as YAML: nested too deep") from None
    check_nesting(data, str(path))
    if not isinstance(data, dict):
        raise EagleError(f"{path}: expected keys and values, found {type(data).__name__}")
    try:
        # Through JSON, where strict mode takes a list for a tuple but no string for a number.
        recipe = Recipe.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise explain(error, Recipe, str(path)) from None
    if recipe.name != path.stem:
        raise EagleError(f"{path}: name is {recipe.name!r}, expected {path.stem!r} as in the file's name")
    return recipe


def find_target(target: str) -> tuple[Recipe, Path]:
    """What `target` names and where its relative paths start, before any of its weights are fetched.

    `target` is a recipe's name, a recipe file, a Hugging Face model folder or a hub id (org/name). The recipe
    of a hub id has a default context, as its config.json may not be here. Raises UsageError for a name that
    means nothing.
    """
    if target in _names() or target.endswith((".yaml", ".yml")):
        path = _find(target)
        return _read(path), path.parent
    local = Path(os.path.expanduser(target))  # of any word; Path raises for ~nobody and for one too long
    if os.path.isdir(local):
        source = Source(kind="folder", path=str(local.resolve()))
        return _default_recipe(local.resolve().name, source, local), local.parent
    if os.path.isfile(local):
        raise UsageError(
            f"{target} is a file", hint="give the Hugging Face folder (config.json and safetensors)"
        )
    if HUB_ID.fullmatch(target):
        return _default_recipe(target.partition("/")[2], Source(kind="hub", id=target), None), Path()
    raise UsageError(
        f"unknown target {target!r}: no recipe, no folder and no hub id (org/name)",
        hint=_suggest(target, _names()),
    )


def resolve_target(target: str) -> ResolvedTarget:
    """`target` as for `find_target`, its weights downloaded or dequantised where they are not here yet.

    Raises UsageError for a name that means nothing, EagleError for weights that are absent or damaged.
    """
    recipe, recipe_dir = find_target(target)
    resolved = _resolved_target(recipe, recipe_dir)
    if recipe.target == Source(kind="hub", id=target):  # only now its config.json is here
        own = _default_recipe(target.partition("/")[2], recipe.target, resolved.folder)
        return replace(resolved, recipe=own)
    return resolved


def _default_recipe(name: str, source: Source, folder: Path | None) -> Recipe:
    """For a target without one: the papers' tree, and a context that the positions of `folder` allow."""
    positions = weights.read_config(folder).get("max_position_embeddings") if folder else None
    context = min(positions, _DEFAULT_CONTEXT) if isinstance(positions, int) else _DEFAULT_CONTEXT
    return Recipe(
        name=re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model",
        description=f"defaults for {source}",
        target=source,
        limits=BuildLimits(max_seq_len=context),
    )


def _resolved_target(recipe: Recipe, recipe_dir: Path) -> ResolvedTarget:
    source = recipe.target
    if source.kind == "gguf-package":
        gguf = weights.find_gguf(str(source.package), str(source.version), str(source.file))
        folder, file = weights.convert_gguf(gguf), gguf
    else:
        folder = file = _local(source, recipe_dir)
    return ResolvedTarget(recipe.name, str(source), folder, file, recipe, recipe_dir)


def find_head(head: str, recipe: Recipe) -> HeadSource:
    """What `head` names, before its weights are fetched: `eagle1` or `eagle3` (the recipe's), a checkpoint
    folder or a hub id. Raises UsageError for a name that means nothing."""
    if head in ("eagle1", "eagle3"):
        source = recipe.heads.get(head)  # type: ignore[call-overload]
        if source is None:
            heads = f"it has {', '.join(recipe.heads)}" if recipe.heads else "it names none"
            raise UsageError(
                f"no {head} head is known for {recipe.name}; {heads}",
                hint="give a head's folder, or its hub id (org/name)",
                parameters=["head"],
            )
        return source
    local = Path(os.path.expanduser(head))
    if os.path.isdir(local):
        return HeadSource(kind="folder", path=str(local.resolve()))
    if HUB_ID.fullmatch(head):
        return HeadSource(kind="hub", id=head)
    raise UsageError(
        f"unknown head {head!r}: expected eagle1, eagle3, a folder or a hub id (org/name)",
        hint=f"{recipe.name} has {', '.join(recipe.heads) or 'no head of its own'}",
        parameters=["head"],
    )


def resolve_head(head: str, target: ResolvedTarget) -> ResolvedHead:
    """`head` as for `find_head`, its weights downloaded where they are not here yet."""
    source = find_head(head, target.recipe)
    algorithm = head if head in ("eagle1", "eagle3") else None
    folder = _local(source, target.recipe_dir)
    return ResolvedHead(str(source), folder, algorithm, source.settings)  # type: ignore[arg-type]


def _local(source: Source, base: Path) -> Path:
    """The folder of a hub or folder source, fetched if need be and checked."""
    if source.kind == "hub":
        folder = weights.fetch(str(source.id), source.revision)
    else:
        folder = base / str(source.path)
    weights.check_folder(folder)
    return folder
