"""The same tokens, text and prompts as Transformers, on the demo's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.streams import WORDS, stream

from eagle_run.tokenizer import Tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def smollm2() -> Path:
    from eagle_export.reference import recipe

    return recipe.resolve_target("smollm2-135m").folder


SAMPLES = [
    "Hello, world!",
    "x = {\n    1: 22}\n\n1. first\n\n\n12. twelfth",
    "  leading and trailing  ",
    WORDS,
    "<|im_start|>user\nhi<|im_end|>",
]


def test_tokens_and_text_equal_those_of_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2), Tokenizer.load(smollm2)
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
    for sample in SAMPLES:
        ids = theirs(sample).input_ids
        assert ours.encode(sample) == ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
            assert "".join(stream(ours, ids, skip_special_tokens=skip)) == expected


def test_chat_templates_render_as_in_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2), Tokenizer.load(smollm2)
    user, answer = (
        {"role": "user", "content": "What is 1 + 1?\n"},
        {"role": "assistant", "content": " Two <b>"},
    )
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user], [user, answer, user]):
        for prompt in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.render(messages, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == ids
    assert ours.encode_prompt("hi", system="Be brief.") == theirs.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        return_dict=False,
    )


def test_numbers_are_split_as_the_model_was_trained(smollm2: Path) -> None:
    """SmolLM2 isolates digits first, so blank lines before one stay a token; the GGUF just says smollm."""
    ours = Tokenizer.load(smollm2)
    assert [ours.backend_tokenizer.id_to_token(i) for i in ours.encode("a\n\n12")] == ["a", "ĊĊ", "1", "2"]


TOOLS_TEMPLATE = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.reasoning_content is defined %}
        {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
    {%- endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- bos_token ~ message.role ~ ns.n ~ ': ' ~ (message.content | trim) }}
    {%- if loop.last %}{% continue %}{% endif %}
{% endfor %}
{%- generation %}{{ eos_token }}{% endgeneration %}
"""


def test_a_harder_template_renders_as_in_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2), Tokenizer.load(smollm2)
    theirs.chat_template = ours.chat_template = TOOLS_TEMPLATE
    messages = [
        {"role": "user", "content": " ünï "},
        {"role": "assistant", "content": "ok", "reasoning_content": "\nhm\n", "name": None},
    ]
    tools = [{"type": "function", "function": {"name": "f<", "parameters": {"é": 1}}}]
    for some in (None, tools):
        options = {"tools": some, "add_generation_prompt": True}
        assert ours.render(messages, **options) == theirs.apply_chat_template(
            messages, tokenize=False, **options
        )
