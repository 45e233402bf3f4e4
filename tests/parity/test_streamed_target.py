"""Targets that are exported without being loaded: the same weights, the same graphs, the same refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.targetmaker import KINDS, make_model

from eagle_export.checkpoints.weight_stream import as_numpy
from eagle_export.graphs.target import export_target
from eagle_export.models.recorded import Recorded
from eagle_export.models.skeleton import hollow, load_recorded
from eagle_export.models.target import TargetModule, load_target
from eagle_run.errors import EagleError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [(kind, DTYPES[i % 3]) for i, kind in enumerate(KINDS)]
EXPORTED = [
    pair for pair in PAIRS if pair[0] in ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "qwen3-moe")
]
ROWS = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family, one file or several; what is no Llama is stored in bf16."""
    root = tmp_path_factory.mktemp("targets")
    for index, kind in enumerate(KINDS):
        model = make_model(kind)
        model = model if kind.startswith("llama") else model.to(torch.bfloat16)
        model.save_pretrained(root / kind, max_shard_size="5GB" if index % 2 else "50KB")
    return {kind: root / kind for kind in KINDS}


@pytest.mark.parametrize(("kind", "dtype"), PAIRS)
def test_every_weight_is_what_loading_gives(folders: dict[str, Path], kind: str, dtype: torch.dtype) -> None:
    loaded = load_target(folders[kind], dtype)
    model = load_recorded(folders[kind], dtype)
    assert all(isinstance(value, Recorded) for value in model.parameters())
    held = hollow(model)
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight)
    expected = {
        **dict(loaded.named_parameters(remove_duplicate=False)),
        **dict(loaded.named_buffers(remove_duplicate=False)),
    }
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        assert (held[name].dtype, held[name].shape) == (value.dtype, tuple(value.shape)), name
        assert torch.equal(held[name].load(), value), name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), EXPORTED)
def test_the_files_are_those_of_a_loaded_model(
    folders: dict[str, Path], kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded, empty = load_target(folders[kind], dtype), load_recorded(folders[kind], dtype)
    held = hollow(empty)
    expected, found = tmp_path / "loaded" / "target.onnx", tmp_path / "streamed" / "target.onnx"
    spec = export_target(TargetModule(loaded, (1, 2)).eval(), expected, cache_rows=ROWS)
    assert export_target(TargetModule(empty, (1, 2)).eval(), found, cache_rows=ROWS, weights=held) == spec
    for name in ("target.onnx", "target.onnx.data"):
        assert (found.parent / name).read_bytes() == (expected.parent / name).read_bytes()
    state = loaded.state_dict()
    for tensor in onnx.load(found).graph.initializer:
        _check(ir.from_proto(tensor), state)


def _check(tensor: ir.TensorProtocol, state: dict[str, torch.Tensor]) -> None:
    """A weight of the file against the loaded model's: transposed by NumPy, side by side."""
    parts = str(tensor.name).split("+")
    if not all(part.removesuffix(".T") in state for part in parts) or len(tensor.shape) > 2:
        return  # a constant of the graph, or experts
    whole = [as_numpy(state[part.removesuffix(".T")].contiguous()) for part in parts]
    whole = [array.T if part.endswith(".T") else array for array, part in zip(whole, parts, strict=True)]
    expected = np.concatenate(whole, axis=-1)
    assert tensor.numpy().dtype == expected.dtype
    assert np.array_equal(tensor.numpy().view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


def test_a_checkpoint_of_torch_files_is_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders["llama-tied"] / "config.json").read_bytes())
    model = load_target(folders["llama-tied"], torch.float32)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    held = hollow(load_recorded(tmp_path, torch.float16))
    assert torch.equal(held["model.norm.weight"].load(), model.model.norm.weight.half())


def test_a_file_that_the_index_does_not_name_is_no_part_of_the_model(folders: dict[str, Path]) -> None:
    folder = folders["llama"]
    save_file({"model.norm.weight": torch.zeros(9)}, folder / "consolidated.safetensors")
    held = hollow(load_recorded(folder, torch.float32))
    (folder / "consolidated.safetensors").unlink()
    assert held["model.norm.weight"].shape == (64,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def both_refuse(folder: Path) -> str:
    messages = []
    for load in (load_target, load_recorded):
        with pytest.raises(EagleError) as caught:
            load(folder, torch.float32)
        messages.append(f"{caught.value.message} {caught.value.hint}")
    assert messages[0] == messages[1]
    return messages[0]


def test_what_loading_refuses_is_refused_without_loading(folder: Path) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    whole, said = load_file(file), config.read_text()

    def write(tensors: dict[str, torch.Tensor], **changes: object) -> None:
        save_file(tensors, file, metadata={"format": "pt"})
        config.write_text(json.dumps(json.loads(said) | changes))

    key = "model.layers.1.self_attn.k_proj.weight"
    write({name: tensor for name, tensor in whole.items() if name != key})
    assert f"lack {key}" in both_refuse(folder)
    write(whole, num_hidden_layers=2)
    assert "no place for model.layers.2" in both_refuse(folder)
    write(whole | {key: whole[key][:-1].clone()})
    both_refuse(folder)
    write(whole, tie_word_embeddings=False)
    write({name: tensor for name, tensor in whole.items() if name != "lm_head.weight"})
    assert "lack lm_head.weight" in both_refuse(folder)
    file.unlink()
    assert "no weights" in both_refuse(folder)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_matrix_that_is_stored_twice(folders: dict[str, Path], tmp_path: Path, same: bool) -> None:
    """Some fine-tunes store both. Transformers shares them if they are equal."""
    tensors = load_file(folders["llama-tied"] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if same else 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders["llama-tied"] / "config.json").read_bytes())
    for load in (load_target, load_recorded):
        model = load(tmp_path, torch.float32)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is same
    held = hollow(model)
    assert torch.equal(held["lm_head.weight"].load(), tensors["lm_head.weight"])


@pytest.mark.parametrize("keep", [4, 200, -50])
def test_a_cut_file_is_refused_without_loading(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EagleError, match="not a whole safetensors file"):
        load_recorded(folder, torch.float32)
