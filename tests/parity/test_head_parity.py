"""The torch head against a slow, plain restatement of the papers' heads.

The restatement works on one sequence at a time, in float64, without a cache: attention of a row is a Python
loop over what it may see. It reads config.json and the checkpoint's tensors itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.headmaker import RECIPES, Head, make_head
from torch import Tensor

from eagle_export.heads.load import load_head
from eagle_export.models.head import Draft, Fuse, Rope, build_head

torch.set_num_threads(1)
ROWS = 24  # S
KINDS = sorted(RECIPES)
FUSED = [kind for kind in KINDS if "eagle3" in kind and not kind.endswith("-last")]
Built = tuple[Head, Fuse | None, Draft]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (checkpoint, fuse, draft), each made once."""
    made: dict[str, Built] = {}

    def get(kind: str) -> Built:
        if kind not in made:
            head = make_head(RECIPES[kind])
            folder = head.write(tmp_path_factory.mktemp(kind))
            made[kind] = (head, *build_head(load_head(folder, head.target), head.embedding, head.lm_head))
        return made[kind]

    return get


# --- the restatement ----------------------------------------------------------------------------------------


def norm(head: Head, x: Tensor, name: str) -> Tensor:
    weight = head.tensors[f"{name}.weight"].double()
    return x / (x.pow(2).mean(-1, keepdim=True) + head.config["rms_norm_eps"]).sqrt() * weight


def linear(head: Head, x: Tensor, name: str) -> Tensor:
    y = x @ head.tensors[f"{name}.weight"].double().T
    return y + head.tensors[f"{name}.bias"].double() if f"{name}.bias" in head.tensors else y


def rotate(head: Head, x: Tensor, position: int) -> Tensor:
    """x [Dh]: the pairs (i, i + Dh/2) turn by position * frequency i."""
    half, scaling = len(x) // 2, head.config.get("rope_scaling") or {}
    out = x.clone()
    for i in range(half):
        theta = (head.config.get("rope_parameters") or head.config).get("rope_theta", 10000.0)
        frequency = theta ** (-i / half)
        if scaling.get("type") == "linear":
            frequency /= scaling["factor"]
        if scaling.get("rope_type") == "llama3":
            # long waves are stretched, short ones kept, those between are mixed by how often they fit
            fits = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            keep = min(1.0, max(0.0, (fits - low) / (high - low)))
            frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def attend(head: Head, x: Tensor, layer: str) -> Tensor:
    """Causal attention of all rows x [T, width] of one sequence, at positions 0..T-1."""
    heads, kv_heads = head.config["num_attention_heads"], head.config["num_key_value_heads"]
    q, k, v = (linear(head, x, f"{layer}self_attn.{key}_proj") for key in "qkv")
    q, k, v = q.view(len(x), heads, -1), k.view(len(x), kv_heads, -1), v.view(len(x), kv_heads, -1)
    if f"{layer}self_attn.q_norm.weight" in head.tensors:
        q, k = norm(head, q, f"{layer}self_attn.q_norm"), norm(head, k, f"{layer}self_attn.k_norm")
    out = torch.zeros_like(q)
    for t in range(len(x)):
        for h in range(heads):
            g = h * kv_heads // heads
            turned = rotate(head, q[t, h], t)
            scores = [turned @ rotate(head, k[j, g], j) / math.sqrt(q.shape[-1]) for j in range(t + 1)]
            share = torch.stack(scores).softmax(0)
            out[t, h] = sum(share[j] * v[j, g] for j in range(t + 1))
    return linear(head, out.flatten(1), f"{layer}self_attn.o_proj")


def feed_forward(head: Head, x: Tensor, layer: str) -> Tensor:
    gate, up = linear(head, x, f"{layer}mlp.gate_proj"), linear(head, x, f"{layer}mlp.up_proj")
    return linear(head, gate * gate.sigmoid() * up, f"{layer}mlp.down_proj")


def restated_fuse(head: Head, features: Tensor) -> Tensor:
    """features [T, n*H] -> [T, Hd]."""
    features = features.double()
    if head.config.get("norm_before_fc"):
        features = norm(head, features, "input_norm")
    if head.config.get("fc_norm"):
        parts = features.split(head.target.hidden_size, -1)
        features = torch.cat([norm(head, part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
    return linear(head, features, "fc")


def restated_draft(head: Head, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [T], hidden [T, Hd] of one sequence -> logits [T, Vd], hidden to feed back [T, Hd]."""
    hidden = hidden.double()
    embedded = head.tensors.get("embed_tokens.weight", head.embedding).double()[tokens]
    if "midlayer.hidden_norm.weight" in head.tensors:
        entering = hidden
        if head.config.get("norm_hidden_twice"):
            entering = norm(head, hidden, "midlayer.input_layernorm")
        normed = norm(head, entering, "midlayer.hidden_norm")
        residual = normed if head.config.get("norm_before_residual") else hidden
        x = torch.cat([norm(head, embedded, "midlayer.input_layernorm"), normed], -1)
        x = residual + attend(head, x, "midlayer.")
        x = x + feed_forward(head, norm(head, x, "midlayer.post_attention_layernorm"), "midlayer.")
        for i in range(1, head.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            x = x + attend(head, norm(head, x, f"{layer}input_layernorm"), layer)
            x = x + feed_forward(head, norm(head, x, f"{layer}post_attention_layernorm"), layer)
        normed = norm(head, x, "norm")
        return linear(head, normed, "lm_head"), normed if head.config.get("norm_output") else x
    x = linear(head, torch.cat([embedded, hidden], -1), "fc")
    for i in range(head.config["num_hidden_layers"]):
        layer = f"layers.{i}."
        x = x + attend(head, x if i == 0 else norm(head, x, f"{layer}input_layernorm"), layer)
        x = x + feed_forward(head, norm(head, x, f"{layer}post_attention_layernorm"), layer)
    return x @ head.lm_head.double().T, x


# --- running the module -------------------------------------------------------------------------------------


def empty_cache(draft: Draft, batch: int) -> list[Tensor]:
    """Cache tensors full of what an earlier user left there: nothing but the mask may keep it out."""
    shape = (batch, draft.spec.kv_heads, ROWS, draft.spec.head_dim)
    return [torch.full(shape, 7.0) for _ in range(2 * draft.spec.layers)]


def causal(batch: int, start: int, rows: int, width: int) -> Tensor:
    columns, lines = torch.arange(width), torch.arange(start, start + rows)[:, None]
    return (columns <= lines).expand(batch, 1, rows, width)


def forward(
    draft: Draft, tokens: Tensor, hidden: Tensor, start: int, past: list[Tensor]
) -> tuple[Tensor, ...]:
    """All rows [B, T] from position `start` on, logits of each of them."""
    batch, rows = tokens.shape
    position = torch.arange(start, start + rows).expand(batch, rows)
    index = torch.full((batch,), start)
    mask = causal(batch, start, rows, start + rows)
    with torch.no_grad():
        return draft(tokens, hidden, position, mask, index, torch.arange(rows).expand(batch, rows), *past)


def inputs(draft: Draft, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(draft.spec.vocab_size, (batch, rows), generator=generator)
    return tokens, torch.randn(batch, rows, draft.spec.hidden_size, generator=generator)


@pytest.mark.parametrize("kind", FUSED)
def test_fuse_equals_restatement(built: Any, kind: str) -> None:
    head, fuse, _ = built(kind)
    features = torch.randn(2, 5, fuse.spec.feature_width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = fuse(features)
    for b in range(2):
        torch.testing.assert_close(hidden[b].double(), restated_fuse(head, features[b]), atol=1e-4, rtol=0)


def test_eagle3_does_not_see_the_scale_of_an_embedding(built: Any) -> None:
    """Of a target that multiplies it (Gemma) a head gets it as it is stored. EAGLE-1 would see that."""
    for kind, same in (("eagle3-safeai", True), ("eagle1-no-bias", False)):
        head, _, draft = built(kind)
        scaled = Draft(draft.spec)
        scaled.load_state_dict(draft.state_dict())
        with torch.no_grad():
            scaled.embed_tokens.weight *= head.config["hidden_size"] ** 0.5
        tokens, hidden = inputs(draft, 1, 6)
        found, other = (forward(part, tokens, hidden, 0, empty_cache(part, 1))[0] for part in (draft, scaled))
        assert torch.allclose(found, other, atol=1e-3) is same


@pytest.mark.parametrize("kind", KINDS)
def test_draft_equals_restatement(built: Any, kind: str) -> None:
    head, fuse, draft = built(kind)
    assert (fuse is None) == (kind not in FUSED)
    tokens, hidden = inputs(draft, 2, 9)
    past = empty_cache(draft, 2)
    logits, out, *present = forward(draft, tokens, hidden, 0, past)
    assert logits.dtype == torch.float32
    assert all(a is b for a, b in zip(present, past, strict=True))
    for b in range(2):
        want_logits, want_out = restated_draft(head, tokens[b], hidden[b])
        torch.testing.assert_close(logits[b].double(), want_logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(out[b].double(), want_out, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_trees_equal_restatement(built: Any, kind: str) -> None:
    """Prefill in two chunks, then a tree of drafts that feed on their parents' outputs, then the tree's rows
    are overwritten by an accepted pair: each row must be what a fresh pass over its own path gives.
    """
    head, _, draft = built(kind)
    tokens, hidden = inputs(draft, 1, 6)
    past = empty_cache(draft, 1)
    forward(draft, tokens[:, :4], hidden[:, :4], 0, past)
    _, out, *_ = forward(draft, tokens[:, 4:], hidden[:, 4:], 4, past)

    # level 1: rows 6 and 7, children of the root; level 2: rows 8 and 9 under 6, row 10 under 7
    parents = {6: 5, 7: 5, 8: 6, 9: 6, 10: 7}
    names = torch.tensor([11, 12, 13, 14, 15])
    fed = {5: out[0, -1]}  # row -> its hidden to feed back
    paths: dict[int, list[int]] = {5: []}
    for level in ([6, 7], [8, 9, 10]):
        mask = torch.zeros(1, 1, len(level), level[-1] + 1, dtype=torch.bool)
        mask[..., :6] = True
        for line, row in enumerate(level):
            paths[row] = [*paths[parents[row]], row]
            mask[0, 0, line, paths[row]] = True
        position = torch.tensor([[5 + len(paths[row]) for row in level]])
        ids = names[[row - 6 for row in level]][None]
        given = torch.stack([fed[parents[row]] for row in level])[None]
        index, all_rows = torch.tensor([level[0]]), torch.arange(len(level))[None]
        with torch.no_grad():
            logits, out, *_ = draft(ids, given, position, mask, index, all_rows, *past)
        for line, row in enumerate(level):
            fed[row] = out[0, line]
            path = paths[row]
            path_tokens = torch.cat([tokens[0], names[[r - 6 for r in path]]])
            path_hidden = torch.cat([hidden[0], torch.stack([fed[parents[r]] for r in path])])
            want_logits, want_out = restated_draft(head, path_tokens, path_hidden)
            torch.testing.assert_close(logits[0, line].double(), want_logits[-1], atol=1e-4, rtol=0)
            torch.testing.assert_close(out[0, line].double(), want_out[-1], atol=1e-4, rtol=0)

    more_tokens, more_hidden = inputs(draft, 1, 7)
    last = more_tokens[:, -1:], more_hidden[:, -1:]
    logits, *_ = forward(draft, *last, 6, past)
    want, _ = restated_draft(head, torch.cat([tokens, last[0]], 1)[0], torch.cat([hidden, last[1]], 1)[0])
    torch.testing.assert_close(logits[0, 0].double(), want[-1], atol=1e-4, rtol=0)


def test_rows_do_not_see_each_other_unless_the_mask_says_so(built: Any) -> None:
    _, _, draft = built("eagle3-safeai")
    tokens, hidden = inputs(draft, 1, 3)
    alone = torch.eye(3, dtype=torch.bool)[None, None]
    args = (
        torch.zeros(1, 3, dtype=torch.long),
        alone,
        torch.zeros(1, dtype=torch.long),
        torch.arange(3)[None],
    )
    with torch.no_grad():
        first, *_ = draft(tokens, hidden, *args, *empty_cache(draft, 1))
        other, *_ = draft(tokens * torch.tensor([[1, 0, 0]]), hidden, *args, *empty_cache(draft, 1))
    assert torch.equal(first[0, 0], other[0, 0])
    assert not torch.allclose(first[0, 1], other[0, 1])


def test_half_precision_keeps_exact_positions(built: Any) -> None:
    head, _, draft = built("eagle3-safeai")
    before = draft.rope(torch.tensor([[101]]))
    half = Draft(draft.spec).half()
    assert half.rope.inv_freq.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(half.rope(torch.tensor([[101]])), before, strict=True))
    assert half.norm.weight.dtype == torch.float16
    assert head.tensors["norm.weight"].dtype == torch.float32


def test_yarn_scales_the_rotation(built: Any) -> None:
    _, _, draft = built("eagle3-safeai")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    cos, sin = Rope(replace(draft.spec, rope_scaling=scaling))(torch.tensor([[3, 99]]))
    length = (0.1 * math.log(4) + 1) ** 2  # YaRN, arXiv 2309.00071, section 3.4
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, length))
