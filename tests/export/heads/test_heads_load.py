"""Reading heads: what a checkpoint of each kind becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.headmaker import DRAFT_VOCAB, LAYERS, RECIPES, VOCAB, WIDTH, Head, Target, make_head

from eagle_export.checkpoints.weights import check_folder
from eagle_export.heads.load import load_head
from eagle_export.heads.settings import HeadSettings
from eagle_export.heads.spec import expected_shapes
from eagle_export.models.head import Draft, Fuse, build_head
from eagle_run.errors import EagleError

IDS = "eagle_aux_hidden_state_layer_ids"
REAL = Path(__file__).parents[3] / "recipes" / "smollm2-135m" / "eagle3"


def made(kind: str = "eagle3-safeai", **config: Any) -> Head:
    head = make_head(RECIPES[kind])
    return replace(head, config=head.config | config)


def with_tensor(head: Head, name: str, tensor: torch.Tensor) -> Head:
    return replace(head, tensors={**head.tensors, name: tensor})


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_spec_names_every_tensor(kind: str, tmp_path: Path) -> None:
    head = made(kind)
    loaded = load_head(head.write(tmp_path), head.target)
    weights = {name: tensor for name, tensor in head.tensors.items() if name not in ("d2t", "t2d")}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_shapes(loaded.spec)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in weights.items())
    parts = Draft(loaded.spec).state_dict()
    if loaded.spec.has_fuse:
        parts |= Fuse(loaded.spec).state_dict()
    borrowed = set() if loaded.spec.own_embedding else {"embed_tokens.weight"}
    borrowed |= set() if loaded.spec.own_lm_head else {"lm_head.weight"}
    assert set(parts) == set(weights) | borrowed


def test_safeai_eagle3(tmp_path: Path) -> None:
    head = made()
    loaded = load_head(head.write(tmp_path), head.target)
    spec = loaded.spec
    assert (spec.algorithm, spec.dialect, spec.layers, spec.has_fuse) == ("eagle3", "safeai", 1, True)
    assert (spec.feature_layers, spec.feature_width) == ((2, LAYERS // 2, LAYERS - 3), 3 * WIDTH)
    assert (spec.rope_theta, spec.rope_scaling, spec.own_embedding) == (10000.0, {}, False)
    assert loaded.draft_to_target.dtype == torch.int64
    marked = head.tensors["t2d"].nonzero().flatten()
    assert torch.equal(loaded.draft_to_target, marked)


def test_vocabulary_order_comes_from_d2t(tmp_path: Path) -> None:
    head = made()
    ids = (head.tensors["d2t"] + torch.arange(DRAFT_VOCAB)).flip(0)  # in order of frequency, say
    head = with_tensor(head, "d2t", ids - torch.arange(DRAFT_VOCAB))
    assert torch.equal(load_head(head.write(tmp_path), head.target).draft_to_target, ids)


def test_full_vocabulary_needs_no_map(tmp_path: Path) -> None:
    head = made("eagle3-full-vocab")
    assert torch.equal(load_head(head.write(tmp_path), head.target).draft_to_target, torch.arange(VOCAB))


def test_eagle1_takes_the_last_hidden_state(tmp_path: Path) -> None:
    head = made("eagle1-no-bias", num_hidden_layers=40)  # public heads keep the target's number there
    spec = load_head(head.write(tmp_path), head.target).spec
    assert (spec.algorithm, spec.feature_layers, spec.layers, spec.has_fuse) == (
        "eagle1",
        (LAYERS,),
        2,
        False,
    )
    assert (spec.fc_bias, spec.draft_vocab_size) == (False, VOCAB)
    assert load_head(made("eagle1-bias").write(tmp_path / "b"), head.target).spec.fc_bias
    assert load_head(made("eagle1-qwen2").write(tmp_path / "q"), head.target).spec.qkv_bias


def test_specforge_flags(tmp_path: Path) -> None:
    head = made("eagle3-specforge")
    spec = load_head(head.write(tmp_path / "a"), head.target).spec
    assert (spec.dialect, spec.fc_norm, spec.norm_output, spec.norm_before_fc) == (
        "specforge",
        True,
        True,
        False,
    )
    assert spec.rope_scaling["rope_type"] == "llama3"
    head = made("eagle3-specforge-norms")
    spec = load_head(head.write(tmp_path / "b"), head.target).spec
    assert (spec.norm_before_fc, spec.norm_before_residual, spec.fc_norm) == (True, True, False)
    assert spec.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 6, 9)),
        ({"eagle_config": {IDS: [1, 5, 8]}}, (2, 6, 9)),  # layer outputs
        ({"eagle_config": {IDS: [0, 4, 9]}}, (1, 5, 10)),  # nobody taps the embeddings
        ({"eagle_config": {IDS: [2, 6, 9]}}, (2, 6, 9)),  # the other numbering in the same place
        ({IDS: [1, 6, 9]}, (1, 6, 9)),
        ({IDS: [3, 4, 5], "eagle_config": {IDS: [1, 5, 8]}}, (3, 4, 5)),
        # The last layer's output, which is 13 here: 12 is what the final norm makes of it.
        ({"eagle_config": {IDS: [8, 10, 12]}}, (8, 10, 13)),
        ({"eagle_config": {IDS: [1, 5, 11]}}, (2, 6, 13)),
        ({IDS: [8, 10, 12]}, (8, 10, 13)),
    ],
)
def test_layer_ids(config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    head = made(architectures=["LlamaForCausalLMEagle3"], **config)
    folder = head.write(tmp_path)
    assert load_head(folder, head.target).spec.feature_layers == expected
    for ids in ((0, 7, 12), (0, 7, 13)):
        assert load_head(folder, head.target, HeadSettings(layer_ids=ids)).spec.feature_layers == ids


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"norm_output": True, "eagle_config": {"norm_output": None}}, True),
        ({"norm_output": None, "eagle_config": {"norm_output": True}}, True),
        ({"norm_output": True, "eagle_config": {"norm_output": True}}, True),
        ({"norm_output": False, "eagle_config": {"norm_output": None}}, False),
    ],
)
def test_a_flag_in_either_place(config: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    head = made(architectures=["LlamaForCausalLMEagle3"], **config)
    assert load_head(head.write(tmp_path), head.target).spec.norm_output is expected


def test_rope_of_transformers_5_and_override(tmp_path: Path) -> None:
    head = made(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    folder = head.write(tmp_path)
    assert load_head(folder, head.target).spec.rope_theta == 1e6
    assert load_head(folder, head.target, HeadSettings(rope_theta=10000.0)).spec.rope_theta == 10000.0


def test_byte_order_mark_null_keys_and_old_buffers_are_fine(tmp_path: Path) -> None:
    head = made(rope_scaling=None, sliding_window=None, new_flag=False, target_hidden_size=None)
    head = with_tensor(head, "midlayer.self_attn.rotary_emb.inv_freq", torch.ones(4))
    folder = head.write(tmp_path)
    (folder / "config.json").write_text(json.dumps(head.config), encoding="utf-8-sig")
    check_folder(folder)  # which `--head FOLDER` passes first
    assert "inv_freq" not in str(sorted(load_head(folder, head.target).tensors))


def test_pickled_and_sharded_weights(tmp_path: Path) -> None:
    head = made()
    whole = load_head(head.write(tmp_path / "whole"), head.target)
    for kind in ("pickled", "shards"):
        folder = head.write(tmp_path / kind)
        (folder / "model.safetensors").unlink()
        if kind == "pickled":
            torch.save(head.tensors, folder / "pytorch_model.bin")
        else:
            write_shards(head, folder)
        loaded = load_head(folder, head.target)
        assert loaded.spec == whole.spec
        assert all(torch.equal(whole.tensors[name], tensor) for name, tensor in loaded.tensors.items())


def write_shards(head: Head, folder: Path) -> None:
    names = sorted(head.tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: head.tensors[name] for name in some}, folder / file)
    weight_map = {name: file for file, some in parts.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_build_shares_and_freezes_the_targets_parts(tmp_path: Path) -> None:
    head = made("eagle1-no-bias")
    _, draft = build_head(load_head(head.write(tmp_path), head.target), head.embedding, head.lm_head)
    assert draft.embed_tokens.weight.data_ptr() == head.embedding.data_ptr()
    assert draft.lm_head.weight.data_ptr() == head.lm_head.data_ptr()
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert trained == set(head.tensors)
    loaded = load_head(tmp_path, head.target)
    with pytest.raises(EagleError, match=r"lm_head\.weight has shape \[61, 40\]"):
        build_head(loaded, head.embedding, torch.zeros(VOCAB, 40))


def test_build_converts(tmp_path: Path) -> None:
    head = made()
    halves = {name: t.half() if t.is_floating_point() else t for name, t in head.tensors.items()}
    folder = replace(head, tensors=halves).write(tmp_path)
    loaded = load_head(folder, head.target)
    assert loaded.tensors["fc.weight"].dtype == torch.float16
    fuse, draft = build_head(loaded, head.embedding, head.lm_head)
    assert {p.dtype for module in (fuse, draft) for p in module.parameters()} == {torch.float32}


def test_the_recipes_head() -> None:
    target = Target(layers=30, hidden_size=576, heads=9, kv_heads=3, head_dim=64, vocab_size=49152)
    loaded = load_head(REAL, target)
    spec = loaded.spec
    assert (spec.algorithm, spec.feature_layers, spec.draft_vocab_size) == ("eagle3", (2, 15, 27), 8192)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.rope_theta) == (9, 9, 64, 100000.0)
    mask = load_file(REAL / "model.safetensors")["t2d"]
    assert torch.equal(loaded.draft_to_target, mask.nonzero().flatten())
    with pytest.raises(EagleError, match=r"hidden size 576, this target has 960"):
        load_head(REAL, replace(target, hidden_size=960))
