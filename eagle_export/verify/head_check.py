"""Is a head read as it was trained? Other readings of the same weights, measured against the bundle's own.

A layer id that is off by one, a norm in another place, another RoPE base: none of that makes an answer wrong,
the drafts are only accepted less often. So every plausible other reading drafts the same answers, and one
that does clearly better is the truth. Answers are teacher-forced and the draft is unrolled over its own
output, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_export.heads.settings import SWITCHES
from eagle_export.heads.spec import HeadSpec, default_feature_layers, raw_last
from eagle_export.models.families import rope_of
from eagle_export.models.head import Draft, Fuse
from eagle_export.models.target import residual_streams
from eagle_export.reference.modules import Modules
from eagle_export.train.ttt import Batch, unroll
from eagle_export.verify.checks import READING, Check

STEPS = 3
LAYER_IDS, SETTING = "head_layer_ids", "head_set"  # what a build is told by, see BuildOptions
# Another reading must be better by this many standard errors and this many nats for the bundle's own to be
# accused. The demo head over 12 answers: layers one off cost 0.08 and 0.12 nats at z 5.9 and 6.9, norms in
# another place whole nats; the best other reading of the right one gains 0.009 at z 1.3.
SIGNIFICANT, CLEAR = 4.0, 0.02


@dataclass(frozen=True)
class Reading:
    """One way to read a head. `choice`: what a build would have to be told; empty for the bundle's own."""

    choice: str
    spec: HeadSpec


@dataclass(frozen=True)
class Measured:
    """What a reading gave.

    acceptance[i]  of the drafts at step i, the share that are the target's tokens.
    likelihood     mean log-probability (nats) that the draft gives the target's tokens, of those it knows.
    gain, z        how much higher that is than the bundle's own reading makes it, in nats and in standard
                   errors of the paired differences.
    """

    choice: str
    acceptance: tuple[float, ...]
    drafts: int
    likelihood: float
    gain: float
    z: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "reading": self.choice or "the bundle's own",
            "acceptance": [round(share, 4) for share in self.acceptance],
            "drafts": self.drafts,
            "log_likelihood": round(self.likelihood, 4),
            "gain": round(self.gain, 4),
            "z": round(self.z, 2),
        }


def readings(spec: HeadSpec, *, layers: int, target_theta: float | None = None) -> list[Reading]:
    """The bundle's own reading first, then the others that a checkpoint can be taken for by mistake.

    layers: of the target. target_theta: its RoPE base, which config.json of a head may repeat or forget.
    """
    others: list[Reading] = []
    if spec.has_fuse:
        for ids in _other_layers(spec.feature_layers, layers):
            choice = f"{LAYER_IDS} {','.join(map(str, ids))}"
            others.append(Reading(choice, replace(spec, feature_layers=ids)))
    if spec.algorithm == "eagle3":
        for name in SWITCHES:
            changed: dict[str, Any] = {name: not getattr(spec, name)}
            choice = f"{SETTING} {name}={str(changed[name]).lower()}"
            others.append(Reading(choice, replace(spec, **changed)))
    if spec.own_embedding and spec.hidden_size == spec.target_hidden_size:
        choice = "the target's embedding, without embed_tokens.weight in its checkpoint,"
        others.append(Reading(choice, replace(spec, own_embedding=False)))
    for theta in dict.fromkeys((10000.0, target_theta)):
        if theta is not None and theta != spec.rope_theta:
            others.append(Reading(f"{SETTING} rope_theta={theta:g}", replace(spec, rope_theta=theta)))
    if spec.rope_scaling:
        others.append(Reading(f"{SETTING} rope_scaling=none", replace(spec, rope_scaling={})))
    return [Reading("", spec), *others]


def _other_layers(own: tuple[int, ...], layers: int) -> list[tuple[int, ...]]:
    """Layer ids that a head could have been meant to read: one off, the usual ones, the last one normed."""
    raw = raw_last(layers)
    plain = [layers if i == raw else i for i in own]  # outputs of layers, the last one before its norm
    shifted = [[i + by for i in plain] for by in (-1, 1)]
    others = [tuple(raw if i == layers else i for i in ids) for ids in shifted if ids[-1] <= layers]
    if len(own) == 3:
        others.append(default_feature_layers(layers))
    if own[-1] in (layers, raw):
        others.append((*own[:-1], layers if own[-1] == raw else raw))
    return [
        ids
        for ids in dict.fromkeys(others)
        if ids != own and list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= raw
    ]


def measure_readings(
    modules: Modules, chosen: Sequence[Reading], answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Measured]:
    """Every reading over the same answers (prompt, answer), which are the target's greedy ones.

    modules: in float32. The first reading is what the others are compared with.
    """
    assert modules.draft is not None
    assert modules.draft_to_target is not None
    embedding = modules.model.get_input_embeddings().weight
    drafts = [_read_as(modules.draft, reading.spec, embedding) for reading in chosen]
    asked = sorted({layer for reading in chosen for layer in reading.spec.feature_layers})
    own = torch.full((modules.draft.spec.vocab_size,), -1)
    own[modules.draft_to_target] = torch.arange(len(modules.draft_to_target))  # draft id of a target id
    tables: list[list[_Drafted]] = [[] for _ in chosen]
    with torch.inference_mode():
        for prompt, answer in answers:
            if len(answer) < 2:
                continue
            tokens = torch.tensor([[*prompt, *answer]])
            states = _states(modules.model, tokens, asked)
            for reading, draft, table in zip(chosen, drafts, tables, strict=True):
                features = torch.cat([states[layer] for layer in reading.spec.feature_layers], dim=-1)
                table.append(_draft(modules.fuse, draft, tokens, features, prompt=len(prompt), own=own))
    if not tables[0]:
        return []
    whole = [_Drafted(*(torch.cat(parts, 1) for parts in zip(*table, strict=True))) for table in tables]
    return [_measured(reading.choice, table, whole[0]) for reading, table in zip(chosen, whole, strict=True)]


def check_readings(measured: Sequence[Measured]) -> Check:
    """Fails when another reading of the head is clearly better than the bundle's own."""
    if not measured or not measured[0].drafts:
        return Check(READING, "ok", "no answer is long enough to try other readings of the head on")
    own, *others = measured
    detail = f"drafts that are the target's tokens, by unrolled step: {_shares(own)} of {own.drafts} in all"
    best = max(others, key=lambda other: other.gain, default=None)
    if best is None:
        return Check(READING, "ok", f"{detail}; there is no other way to read this head")
    if best.z >= SIGNIFICANT and best.gain >= CLEAR:
        detail += f"; read with {best.choice} they are {_shares(best)}: build it again with that"
        return Check(READING, "fail", detail, best.gain, CLEAR)
    detail += f"; none of {len(others)} other readings is clearly better"
    return Check(READING, "ok", detail, best.gain, CLEAR)


def _shares(reading: Measured) -> str:
    return " ".join(f"{share:.2f}" for share in reading.acceptance)


def check_head(
    modules: Modules, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Check, list[Measured]]:
    """The check of a bundle's head, and all that it measured. modules: in float32."""
    assert modules.draft is not None
    theta = rope_of(modules.model.config).get("rope_theta")
    chosen = readings(
        modules.draft.spec,
        layers=modules.target.dims.layers,
        target_theta=float(theta) if isinstance(theta, (int, float)) else None,
    )
    measured = measure_readings(modules, chosen, answers)
    return check_readings(measured), measured


def _read_as(draft: Draft, spec: HeadSpec, embedding: Tensor) -> Draft:
    """The same weights under another spec; embedding [V, H]: the target's."""
    with torch.device("meta"):
        other = Draft(spec)
    state = draft.state_dict()
    if draft.spec.own_embedding and not spec.own_embedding:
        state["embed_tokens.weight"] = embedding.detach()
    other.load_state_dict(state, assign=True)
    return other.eval()


def _states(model: Any, tokens: Tensor, asked: Sequence[int]) -> dict[int, Tensor]:
    with residual_streams(model) as streams:
        states = streams(model.model(input_ids=tokens, use_cache=False, output_hidden_states=True))
    return {layer: states[layer] for layer in asked}


class _Drafted(NamedTuple):
    """Of K steps from N rows: bool [K, N], is there a token to draft, is the draft that token, and does the
    draft vocabulary have it; float32 [K, N], the log-probability of that token (0 where it has it not)."""

    there: Tensor
    hit: Tensor
    known: Tensor
    likelihood: Tensor


def _draft(
    fuse: Fuse | None, draft: Draft, tokens: Tensor, features: Tensor, *, prompt: int, own: Tensor
) -> _Drafted:
    """Drafts the tokens i64 [1, T] from `prompt` on, teacher-forced; own i64 [V]: draft id of a target id."""
    length = tokens.shape[1]
    answers = torch.arange(length)[None] >= prompt
    none = tokens.new_empty(0)
    unrolled = unroll(fuse, draft, Batch(tokens, answers, features, none, none), STEPS)
    draft_ids = own[
        tokens[0][(unrolled.labels + 1).clamp(max=length - 1)]
    ]  # [K, N]: the label row's next token
    known = unrolled.valid & (draft_ids >= 0)
    best, likelihood = [], []
    for raw, ids in zip(unrolled.raw, draft_ids, strict=True):
        logits = draft.logits(raw)  # [N, Vd]
        best.append(logits.argmax(-1))
        chosen = logits.gather(1, ids.clamp(min=0)[:, None])[:, 0]
        likelihood.append(chosen - logits.logsumexp(-1))
    hit = (torch.stack(best) == draft_ids) & known
    return _Drafted(unrolled.valid, hit, known, torch.stack(likelihood) * known)


def _measured(choice: str, table: _Drafted, own: _Drafted) -> Measured:
    shares = (table.hit.sum(1) / table.there.sum(1).clamp(min=1)).tolist()
    known = table.known
    count = max(1, int(known.sum()))
    gains = (table.likelihood - own.likelihood)[known].double()
    error = float(gains.std()) / math.sqrt(count) if count > 1 else 0.0
    gain = float(gains.sum()) / count
    return Measured(
        choice=choice,
        acceptance=tuple(shares),
        drafts=int(table.there.sum()),
        likelihood=float(table.likelihood.sum()) / count,
        gain=gain,
        z=gain / error if error > 0 else 0.0,
    )
