"""The table of families: what passes, what is refused by name, and how far layers see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from eagle_export.models.families import (
    CHUNK,
    FAMILIES,
    FULL,
    REFUSED,
    TEXT_PARTS,
    WINDOW,
    Span,
    check_family,
    family_of,
    layer_spans,
    rope_of,
    text_part,
)
from eagle_run.errors import EagleError

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("config", "spans"),
    [
        (LlamaConfig(), {FULL: None}),
        (MistralConfig(sliding_window=4096), {WINDOW: Span("window", 4096)}),
        (MistralConfig(sliding_window=None), {FULL: None}),
        (Phi3Config(sliding_window=2047), {WINDOW: Span("window", 2047)}),
        (Qwen2Config(use_sliding_window=False, sliding_window=100), {FULL: None}),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=100, max_window_layers=4),
            {FULL: None, WINDOW: Span("window", 100)},
        ),
        (Qwen3MoeConfig(), {FULL: None}),
        (GptOssConfig(), {WINDOW: Span("window", 128), FULL: None}),
        (Gemma3TextConfig(sliding_window=512), {WINDOW: Span("window", 512), FULL: None}),
        (Llama4TextConfig(), {CHUNK: Span("chunk", 8192), FULL: None}),
        (Llama4TextConfig(attention_chunk_size=None), {FULL: None}),
    ],
)
def test_how_far_layers_see(config: Any, spans: dict[str, Span | None]) -> None:
    assert layer_spans(config) == spans
    check_family(config, 1024)


def test_the_language_part_of_models_that_see() -> None:
    for config in (Gemma3Config(), Llama4Config()):
        part = text_part(config)
        assert part.model_type == TEXT_PARTS[config.model_type]
        check_family(part, 4096)
    config = LlamaConfig()
    assert text_part(config) is config


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused_by_name_with_a_reason(kind: str) -> None:
    with pytest.raises(EagleError, match=f"'{kind}' is not supported: it has .{{20}}") as caught:
        family_of(SimpleNamespace(model_type=kind))
    assert "gpt-oss" in caught.value.hint
    assert kind not in FAMILIES
    assert kind not in TEXT_PARTS


def test_names_in_the_table_are_those_of_transformers() -> None:
    known = set(CONFIG_MAPPING_NAMES)
    assert known >= {*FAMILIES, *TEXT_PARTS}
    assert {name for name in REFUSED if name not in known} <= {"kimi_k2", "kimi_linear", "rwkv"}


def test_an_unknown_family() -> None:
    with pytest.raises(EagleError, match="'gpt2' is not supported, expected one of gemma3_text, gpt_oss"):
        family_of(SimpleNamespace(model_type="gpt2"))


def test_longrope_up_to_where_its_frequencies_change() -> None:
    config = Phi3Config(rope_parameters=LONG, max_position_embeddings=131072)
    check_family(config, 4096)
    with pytest.raises(EagleError, match="beyond 4096 tokens its frequencies change") as caught:
        check_family(config, 4097)
    assert "4096 or less" in caught.value.hint
    assert caught.value.parameters == ("max_seq_len",)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(sliding_window=8, layer_types=[WINDOW, FULL] * 16), "in all layers of this"),
        (MistralConfig(sliding_window=8, layer_types=[FULL] * 32), "computes sliding_attention"),
        (MistralConfig(sliding_window=None, layer_types=[WINDOW] * 32), "but no sliding_window"),
        (Gemma3TextConfig(layer_types=[CHUNK] * 26), "chunked_attention layers, but no attention_chunk_size"),
        (Llama4TextConfig(layer_types=[WINDOW] * 48), "sliding_attention layers, but no sliding_window"),
        (GptOssConfig(sliding_window=None), "sliding_attention layers, but no sliding_window"),
    ],
)
def test_layer_types_that_contradict_the_rest(config: Any, words: str) -> None:
    with pytest.raises(EagleError) as caught:
        check_family(config, 128)
    assert words in caught.value.message


def test_layer_types_that_say_the_same() -> None:
    check_family(MistralConfig(sliding_window=8, layer_types=[WINDOW] * 32), 128)
    check_family(MistralConfig(sliding_window=None, layer_types=[FULL] * 32), 128)


def test_a_cap_on_attention_scores() -> None:
    with pytest.raises(EagleError, match="attn_logit_softcapping: it has a cap on its attention scores"):
        check_family(Gemma3TextConfig(attn_logit_softcapping=50.0), 128)


def test_the_rotation_of_layers_that_see_everything() -> None:
    assert rope_of(Gemma3TextConfig())["rope_theta"] == 1e6
    assert rope_of(GptOssConfig())["rope_type"] == "yarn"
    assert rope_of(SimpleNamespace(rope_parameters=None)) == {}
    local = {WINDOW: {"rope_type": "default", "rope_theta": 5.0}}
    assert rope_of(SimpleNamespace(rope_parameters=local))["rope_theta"] == 5.0


def test_a_target_that_does_not_decode() -> None:
    with pytest.raises(EagleError, match="use_bidirectional_attention"):
        check_family(Gemma3TextConfig(use_bidirectional_attention=True), 128)
