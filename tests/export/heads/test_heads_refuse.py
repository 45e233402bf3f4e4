"""Reading heads: everything that is wrong with one is refused, with its name, before anything is traced."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.headmaker import DRAFT_VOCAB, RECIPES, VOCAB, WIDTH, Head, Target, make_head

from eagle_export import heads
from eagle_export.heads.load import load_head
from eagle_export.heads.settings import HeadSettings
from eagle_run.errors import EagleError

IDS = "eagle_aux_hidden_state_layer_ids"


def made(kind: str = "eagle3-safeai", **config: Any) -> Head:
    head = make_head(RECIPES[kind])
    return replace(head, config=head.config | config)


def without(head: Head, *names: str) -> Head:
    return replace(head, tensors={key: value for key, value in head.tensors.items() if key not in names})


def with_tensor(head: Head, name: str, tensor: torch.Tensor) -> Head:
    return replace(head, tensors={**head.tensors, name: tensor})


Change = Callable[[], Head]
nan = torch.full((WIDTH,), float("nan"))

REFUSED: dict[str, tuple[Change, str]] = {
    "missing tensor": (lambda: without(made(), "norm.weight"), "has no norm.weight"),
    "missing tensors": (
        lambda: without(made(), "midlayer.self_attn.q_proj.weight"),
        "has no midlayer.self_attn.q_proj.weight",
    ),
    "missing map": (lambda: without(made(), "d2t", "t2d"), "has no d2t"),
    "left-over tensor": (
        lambda: with_tensor(made(), "midlayer.extra_norm.weight", torch.ones(WIDTH)),
        "nothing uses: midlayer.extra_norm.weight",
    ),
    "norm without its flag": (
        lambda: made("eagle3-specforge", fc_norm=False),
        "nothing uses: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight",
    ),
    "flag without its norm": (lambda: made(norm_before_fc=True), "has no input_norm.weight"),
    "both norms": (lambda: made("eagle3-specforge", norm_before_fc=True), "both norm_before_fc and fc_norm"),
    "unknown flag": (lambda: made(use_swish_gate=True), "use_swish_gate: True"),
    "unknown nested flag": (lambda: made(eagle_config={"parallel": 2}), "parallel: 2"),
    "fc although there is none": (
        lambda: made(eagle_config={"use_aux_hidden_state": False}),
        "nothing uses: fc.weight",
    ),
    "norm of an fc that is not there": (
        lambda: made("eagle3-modelopt-last", norm_before_fc=True),
        "sets norm_before_fc, a norm in front of fc, but use_aux_hidden_state: false",
    ),
    "bias flag without bias": (
        lambda: made(attention_bias=True),
        "q_proj.bias (config.json says attention_bias",
    ),
    "window": (lambda: made(sliding_window=64), "sliding-window attention (64 of 128 positions)"),
    "layer types": (lambda: made(layer_types=["sliding_attention"]), "'sliding_attention' not supported"),
    "mlp bias": (lambda: made(mlp_bias=True), "mlp_bias"),
    "rope type": (lambda: made(rope_scaling={"type": "dynamic", "factor": 2.0}), "RoPE type 'dynamic'"),
    "rope without its numbers": (
        lambda: made(rope_scaling={"type": "llama3", "factor": 8.0}),
        "RoPE type 'llama3' needs a number low_freq_factor",
    ),
    "partial rotary": (lambda: made(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    "rope scaling is a list": (lambda: made(rope_scaling=[1]), "must be objects"),
    "activation": (lambda: made(hidden_act="xielu"), "hidden_act 'xielu'"),
    "another speculator": (lambda: made(speculators_model_type="mtp"), "a 'mtp' speculator"),
    "speculators without a layer": (
        lambda: made(speculators_config={"algorithm": "eagle3"}),
        "transformer_layer_config must be an object, found nothing",
    ),
    "speculators layer of another family": (
        lambda: made("eagle3-speculators", model_type="laguna"),
        "transformer_layer_config is of model_type 'laguna'",
    ),
    "sliding window of speculators": (
        lambda: made("eagle3-speculators", sliding_window=64, layer_types=["sliding_attention"]),
        "sliding-window attention (64 of 128 positions)",
    ),
    "missing tensor of modelopt": (
        lambda: without(made("eagle3-modelopt"), "midlayer.mlp.up_proj.weight"),
        "has no layers.0.mlp.up_proj.weight (eagle3 heads of the modelopt kind have it)",
    ),
    "last layernorm": (
        lambda: made("eagle3-modelopt", eagle_config={"use_last_layernorm": False}),
        "eagle_config.use_last_layernorm: false is not supported",
    ),
    "parallel drafting": (
        lambda: made("eagle3-modelopt", eagle_config={"parallel_draft_step": 4}),
        "parallel_draft_step: 4: heads that draft several tokens",
    ),
    "flag that is a word": (lambda: made(norm_output="yes"), "norm_output must be true or false"),
    "two first layers": (
        lambda: replace(made(), tensors=made().tensors | {"layers.0.hidden_norm.weight": torch.ones(WIDTH)}),
        "its first layer twice",
    ),
    "one tensor twice": (
        lambda: with_tensor(made(), "model.norm.weight", torch.ones(WIDTH)),
        "holds norm.weight twice",
    ),
    "latent attention": (
        lambda: with_tensor(made(), "midlayer.self_attn.kv_a_proj_with_mqa.weight", torch.ones(2, 2)),
        "latent attention (MLA), which is not supported",
    ),
    "experts": (
        lambda: with_tensor(made(), "midlayer.mlp.experts.0.up_proj.weight", torch.ones(2, 2)),
        "experts (MoE)",
    ),
    "parallel eagle": (lambda: with_tensor(made(), "mask_hidden", torch.ones(1, 96)), "a P-EAGLE head"),
    "dflash": (lambda: made(dflash_config={"mask_token_id": 1}), "a DFlash head"),
    "quantised checkpoint": (
        lambda: made("eagle3-modelopt", quantization_config={"quant_algo": "FP8"}),
        "quantised heads are not read",
    ),
    "not a head": (
        lambda: replace(made(), tensors={"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}),
        "not an EAGLE head",
    ),
    "no heads": (
        lambda: made(num_attention_heads=None),
        "num_attention_heads must be a positive whole number",
    ),
    "text for a number": (lambda: made(hidden_size="32"), "hidden_size must be a positive whole number"),
    "negative theta": (lambda: made(rope_theta=-1.0), "rope_theta must be a positive number, found -1.0"),
    "heads do not fit": (lambda: made(num_attention_heads=6), "fits neither head_dim"),
    "kv heads do not divide": (
        lambda: made(num_key_value_heads=3),
        "not a multiple of num_key_value_heads 3",
    ),
    "shape": (
        lambda: with_tensor(made(), "lm_head.weight", torch.ones(7, WIDTH)),
        "lm_head.weight of the head has shape [7, 32], config.json asks for [23, 32]",
    ),
    "quantised": (
        lambda: with_tensor(made(), "norm.weight", torch.ones(WIDTH, dtype=torch.int8)),
        "norm.weight of the head is int8",
    ),
    "not finite": (lambda: with_tensor(made(), "norm.weight", nan), "norm.weight of the head holds values"),
    "other hidden size": (
        lambda: replace(made(), target=Target(hidden_size=64)),
        "hidden size 32, this target has 64",
    ),
    "eagle1 of another hidden size": (
        lambda: replace(made("eagle1-bias"), target=Target(hidden_size=64)),
        "hidden size 32, this target has 64",
    ),
    "narrow draft without an embedding": (
        lambda: without(made("eagle3-own-embedding"), "embed_tokens.weight"),
        "has no embed_tokens.weight (the draft is 32 wide",
    ),
    "other vocabulary": (
        lambda: replace(made(), target=Target(vocab_size=99)),
        "vocabulary of 61 tokens, this target has 99",
    ),
    "draft vocabulary too large": (lambda: made(draft_vocab_size=99), "draft_vocab_size 99 exceeds"),
    "feature count": (
        lambda: with_tensor(made(), "fc.weight", torch.ones(WIDTH, 4 * WIDTH)),
        "fc.weight of the head takes 128 features, which is not 3 layers",
    ),
    "too few layers": (lambda: replace(made(), target=Target(layers=4)), "do not fit a target of 4 layers"),
    "output of a layer that is not there": (
        lambda: made(eagle_config={IDS: [1, 5, 12]}),
        "layer ids [2, 6, 14] do not fit a target of 12 layers: ascending numbers from 0 to 13",
    ),
    "a flag that contradicts itself": (
        lambda: made(norm_output=False, eagle_config={"norm_output": True}),
        "norm_output is false at the top level and true in eagle_config",
    ),
    "ids are no numbers": (lambda: made(eagle_config={IDS: ["1", 5, 8]}), "must be a list of layer numbers"),
    "d2t out of range": (
        lambda: with_tensor(made(), "d2t", torch.full((DRAFT_VOCAB,), VOCAB)),
        "leads out of the vocabulary of 61 tokens: ids 61 to 83",
    ),
    "d2t negative": (
        lambda: with_tensor(made(), "d2t", torch.full((DRAFT_VOCAB,), -1)),
        "leads out of the vocabulary",
    ),
    "d2t twice": (
        lambda: with_tensor(made(), "d2t", -torch.arange(DRAFT_VOCAB)),
        "maps several draft ids to one target id",
    ),
    "d2t of another size": (
        lambda: with_tensor(made(), "d2t", torch.zeros(5, dtype=torch.long)),
        "d2t of the head",
    ),
    "d2t holds ids": (
        lambda: without(with_tensor(made(), "d2t", torch.arange(DRAFT_VOCAB) + 7), "t2d"),
        "d2t of the head holds 23 different numbers, as target ids would be",
    ),
    "d2t against t2d": (
        lambda: with_tensor(made(), "d2t", torch.zeros(DRAFT_VOCAB, dtype=torch.long)),
        "t2d of the head does not mark",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    head = change()
    with pytest.raises(EagleError) as error:
        load_head(head.write(tmp_path), head.target)
    assert message in error.value.message
    assert error.value.hint


def test_override_of_layers_is_checked(tmp_path: Path) -> None:
    folder, target = made().write(tmp_path / "a"), Target()
    for ids in ((3, 2, 9), (2, 2, 9), (2, 6, 14), (-1, 6, 9)):
        with pytest.raises(EagleError, match="do not fit a target of 12 layers"):
            load_head(folder, target, HeadSettings(layer_ids=ids))
    with pytest.raises(EagleError, match="which is not 2 layers"):
        load_head(folder, target, HeadSettings(layer_ids=(2, 6)))
    with pytest.raises(EagleError, match="EAGLE-1 head: it takes the last hidden state only"):
        load_head(made("eagle1-bias").write(tmp_path / "b"), target, HeadSettings(layer_ids=(11,)))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_damaged_weights(name: str, damage: str, tmp_path: Path) -> None:
    head = made()
    folder = head.write(tmp_path)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(head.tensors, folder / name)
    path = folder / name
    content = path.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "noise": b"\x7f" * 4096, "empty": b""}[damage]
    path.write_bytes(damaged)
    with pytest.raises(EagleError, match=f"{name} is damaged") as error:
        load_head(folder, head.target)
    assert error.value.hint


def test_pickle_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    folder = made().write(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")  # any class, not only tensors
    with pytest.raises(EagleError, match="damaged or not what its name says"):
        load_head(folder, Target())
    torch.save({"fc.weight": [1, 2]}, folder / "pytorch_model.bin")
    with pytest.raises(EagleError, match="plain table of tensors"):
        load_head(folder, Target())


def test_incomplete_folders(tmp_path: Path) -> None:
    head = made()
    with pytest.raises(EagleError, match=r"no config\.json in"):
        load_head(tmp_path / "nowhere", head.target)
    folder = head.write(tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        EagleError, match=r"bare: no weights: expected model\.safetensors or pytorch_model\.bin"
    ):
        load_head(folder, head.target)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(head.tensors, "b.safetensors")}))
    with pytest.raises(EagleError, match=r"lists b\.safetensors, not found"):
        load_head(folder, head.target)
    rest = {name: tensor for name, tensor in head.tensors.items() if name != "norm.weight"}
    save_file(rest, folder / "b.safetensors")
    with pytest.raises(EagleError, match=r"has no norm\.weight"):
        load_head(folder, head.target)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../whole.safetensors"}}))
    with pytest.raises(EagleError, match=r"points outside its folder: \.\./whole\.safetensors"):
        load_head(folder, head.target)


@pytest.mark.parametrize("content", ['{"hidden_size": 32', "[]", "\ufffd"])
def test_broken_config(content: str, tmp_path: Path) -> None:
    folder = made().write(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(EagleError, match=r"config\.json: (not readable as JSON|expected a JSON object)"):
        load_head(folder, Target())


def test_every_refusal_says_what_to_do() -> None:
    package = Path(heads.__file__).parent
    for module in (*package.glob("*.py"), package.parent / "models/head.py"):
        calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
        raised = [call for call in calls if getattr(call.func, "id", "") == "EagleError"]
        without = [call.lineno for call in raised if "hint" not in {word.arg for word in call.keywords}]
        assert not without, (module, without)
