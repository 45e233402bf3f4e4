"""Heads that their trainers' own packages write, against those packages' own teacher-forced forward.

Each test needs its package (speculators, nvidia-modelopt, specforge), which this project does not install.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.headmaker import HEADS, INNER, KV_HEADS, LAYERS, VOCAB, WIDTH, Target
from torch import Tensor, nn

from eagle_export.heads.load import load_head
from eagle_export.heads.settings import UNSAID, HeadSettings
from eagle_export.heads.spec import HeadSpec
from eagle_export.models.head import build_head
from eagle_export.train.ttt import Batch, unroll

ROWS, STEPS, DRAFT_VOCAB = 12, 3, 23
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH // HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def draw_weights(module: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else noise * 1.5 * weight.shape[-1] ** -0.5)


def draft_ids(*, ordered: bool) -> Tensor:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB]
    return ids.sort().values if ordered else ids


def inputs(features: int) -> tuple[Tensor, Tensor]:
    """tokens i64 [1, T + 1] and features [1, T + 1, n*H]."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (1, ROWS + 1), generator=generator)
    return tokens, torch.randn(1, ROWS + 1, features * WIDTH, generator=generator)


def ours(
    folder: Path, embedding: Tensor, lm_head: Tensor, said: HeadSettings = UNSAID
) -> tuple[HeadSpec, list[Tensor], list[Tensor]]:
    """The head as this project reads it: spec, then logits and raw hidden [rows, ...] of each step.

    The rows are those for which every step has a token.
    """
    loaded = load_head(folder, Target(), said)
    fuse, draft = build_head(loaded, embedding, lm_head)
    tokens, features = inputs(len(loaded.spec.feature_layers))
    none = tokens.new_empty(0)
    with torch.no_grad():
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        found = unroll(fuse, draft, Batch(tokens, everywhere, features, none, none), STEPS)
        raw = [step[: ROWS - STEPS + 1] for step in found.raw]
        return loaded.spec, [draft.logits(step) for step in raw], raw


def compare(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b[0, : a.shape[0]].float(), atol=2e-4, rtol=0)


# --- speculators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        ((2, 6, 9), {}),
        ((2, 6, 9), {"norm_before_residual": True, "norm_before_fc": True}),
        ((1, 3, 5, 9), {"fc_norm": True, "norm_output": True}),
    ],
    ids=["plain", "gpt-oss", "3.1"],
)
def test_speculators(kind: str, layers: tuple[int, ...], flags: dict[str, bool], tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 500000.0}
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**SIZES, rope_parameters=rope)
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=list(layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    model = Eagle3DraftModel(config).float()
    draw_weights(model)
    ids = draft_ids(ordered=True)
    marked = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    model.load_vocab_mappings(marked, ids - torch.arange(DRAFT_VOCAB))
    model.save_pretrained(tmp_path)

    logits, hidden = [], []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out))
    model.layers[-1].register_forward_hook(lambda _, __, out: hidden.append(out))
    tokens, features = inputs(len(layers))
    place = torch.arange(ROWS)[None]
    with torch.no_grad():
        model(features[:, :-1], tokens[:, 1:], torch.zeros_like(place), position_ids=place, ttt_steps=STEPS)

    spec, mine, raw = ours(tmp_path, torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH))
    assert (spec.dialect, spec.feature_layers, spec.rope_theta) == ("speculators", layers, 500000.0)
    assert (spec.qk_norm, spec.own_embedding) == (kind == "qwen3", True)
    assert all(getattr(spec, flag) for flag in flags)
    compare(mine, logits)
    compare(raw, hidden)


# --- ModelOpt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_modelopt(depth: int, tmp_path: Path) -> None:
    """Its decoder layer norms hidden twice, which no inference engine does: see docs/heads.md."""
    pytest.importorskip("modelopt")
    import modelopt.torch.speculative as mtsp
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS})).float()
    kept = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    layer = {key: SIZES[key] for key in kept} | {
        "num_hidden_layers": depth,
        "draft_vocab_size": DRAFT_VOCAB,
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
    }
    mtsp.convert(model, [("eagle", {"eagle_architecture_config": layer, "eagle_use_torch_compile": False})])
    draft: Any = model.eagle_module
    draw_weights(draft)
    ids = draft_ids(ordered=False)
    draft.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    model.get_exporter().export(tmp_path)

    draft.rotary_emb = LlamaRotaryEmbedding(config=draft.config)
    tokens, features = inputs(3)
    mask = torch.zeros(1, 1, ROWS, ROWS).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
    embedding = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        hidden = draft.fc(features[:, :-1])
        normed, raw, _ = draft(hidden, embedding[tokens[:, 1:]], attention_mask=mask)
        logits = draft.lm_head(normed)

    said = HeadSettings(rope_scaling="none", norm_hidden_twice=True)
    spec, mine, mine_raw = ours(tmp_path, embedding, torch.zeros(VOCAB, WIDTH), said)
    assert (spec.dialect, spec.feature_layers, spec.layers) == ("modelopt", (2, 6, 9), depth)
    compare(mine[:1], [logits])
    compare(mine_raw[:1], [raw])
    assert torch.equal(load_head(tmp_path, Target()).draft_to_target, ids)
    _, single, _ = ours(tmp_path, embedding, torch.zeros(VOCAB, WIDTH), HeadSettings(rope_scaling="none"))
    assert not torch.allclose(single[0], mine[0], atol=1e-2)
    assert load_head(tmp_path, Target()).spec.rope_scaling["factor"] == 32.0  # as it is written


# --- SpecForge ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fc_norm", [False, True])
def test_specforge(fc_norm: bool, tmp_path: Path) -> None:
    """Version 0.2 calls the norm in front of lm_head norm_output: its heads feed back what is not normed."""
    pytest.importorskip("specforge")
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    config = LlamaConfig(
        **SIZES,
        draft_vocab_size=DRAFT_VOCAB,
        fc_norm=fc_norm,
        norm_output=True,
        architectures=["LlamaForCausalLMEagle3"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    model = LlamaForCausalLMEagle3(config).float()
    draw_weights(model)
    ids = draft_ids(ordered=True)
    model.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True))
    model.save_pretrained(tmp_path)

    tokens, features = inputs(3)
    logits, hidden = [], []
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # its norms are compiled
        fed = model.project_hidden_states(features[:, :-1])
        mask = torch.zeros(1, 1, ROWS, ROWS).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
        cache: list[list[Tensor]] = [[], []]
        for step in range(STEPS):
            following = torch.cat((tokens[:, 1 + step :], tokens.new_zeros(1, step)), 1)
            fed = model.backbone(
                input_embeds=model.embed_input_ids(following),
                hidden_states=fed,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(ROWS)[None],
                use_cache=True,
            )
            hidden.append(fed)
            logits.append(model.compute_logits(fed))

    spec, mine, raw = ours(
        tmp_path, torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH), HeadSettings(norm_output=False)
    )
    assert (spec.dialect, spec.feature_layers, spec.fc_norm) == ("specforge", (2, 6, 9), fc_norm)
    assert load_head(tmp_path, Target()).spec.norm_output  # what consumers take it for
    compare(mine, logits)
    compare(raw, hidden)
