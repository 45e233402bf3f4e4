"""Data on its way in: shards, masks, vocabularies, batches, and whose words they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.trainset import PROMPTS, TALKS, Letters, write_npz

from eagle_export.train.batches import epoch_batches, pack, share, split
from eagle_export.train.features import TargetFeatures
from eagle_export.train.origin import check_origin
from eagle_export.train.samples import Samples, load_samples
from eagle_export.train.vocab import choose_vocabulary
from eagle_run.errors import EagleError, UsageError


def write_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "data.json").write_text(json.dumps({"version": 1, "target": {"sha256": "abc"}}))
    tensors = {
        "tokens": torch.tensor([token for talk in TALKS for token in talk], dtype=torch.int32),
        "offsets": torch.tensor([0, 5, 12, 15]),
        "prompt_lengths": torch.tensor(PROMPTS, dtype=torch.int32),
        "temperature": torch.zeros(3),
    }
    save_file({**tensors, **changes}, folder / "00000.safetensors")
    return folder


def test_folders_and_npz_files_hold_the_same_conversations(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    npz = write_npz(tmp_path / "data.npz", TALKS, PROMPTS)
    samples = load_samples([folder, npz], vocab_size=20, target_sha256="abc")
    assert len(samples) == 6
    assert samples.lengths().tolist() == [5, 7, 3, 5, 7, 3]
    for number, (talk, prompt) in enumerate(zip(TALKS * 2, PROMPTS * 2, strict=True)):
        tokens, answers = samples.conversation(number)
        assert tokens.tolist() == talk
        assert answers.tolist() == [False] * prompt + [True] * (len(talk) - prompt)


def test_a_mask_of_several_turns_is_taken(tmp_path: Path) -> None:
    mask = torch.tensor([0, 1, 0, 1, 1] + [0] * 10, dtype=torch.uint8)
    samples = load_samples([write_folder(tmp_path / "data", loss_mask=mask)], vocab_size=20)
    assert samples.conversation(0)[1].tolist() == [False, True, False, True, True]
    assert not samples.conversation(2)[1].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.tensor([0, 5, 12, 14])}, "do not fit its 15 tokens"),
        ({"prompt_lengths": torch.tensor([2, 8, 1])}, "do not fit"),
        ({"tokens": torch.full((15,), 20)}, "this target has 20 tokens"),
        ({"loss_mask": torch.zeros(3, dtype=torch.uint8)}, "loss_mask has 3 entries"),
        ({"tokens": torch.zeros(15, 2, dtype=torch.int32)}, "tokens should be a row"),
        ({"tokens": torch.full((15,), 1.5)}, "tokens should be a row of whole numbers"),
        ({"offsets": torch.tensor(15)}, "offsets should be a row"),
    ],
)
def test_damaged_data_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        load_samples([write_folder(tmp_path / "data", **changes)], vocab_size=20)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_npz_is_refused(tmp_path: Path, damage: str) -> None:
    path = write_npz(tmp_path / "d.npz", TALKS, PROMPTS)
    content = path.read_bytes()
    flipped = bytes([*content[:150], content[150] ^ 255, *content[151:]])
    path.write_bytes({"cut": content[:200], "flipped": flipped, "empty": b"", "text": b"hello"}[damage])
    with pytest.raises(EagleError, match=r"d\.npz: not readable"):
        load_samples([path], vocab_size=20)


def test_a_shard_whose_conversations_were_all_dropped_is_no_damage(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    empty = torch.zeros(0, dtype=torch.int32)
    nothing = {"tokens": empty, "offsets": torch.tensor([0]), "prompt_lengths": empty, "loss_mask": empty}
    save_file(nothing, folder / "00001.safetensors")
    assert len(load_samples([folder], vocab_size=20)) == 3
    (folder / "00000.safetensors").unlink()
    with pytest.raises(UsageError, match="no conversations"):
        load_samples([folder], vocab_size=20)


def test_answers_to_learn_from_are_counted_up_to_the_length(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    # Answers are 7 8 9 | 7 7 7 3 | 2 8; the second token of a conversation is nobody's draft.
    assert [samples.answered(length) for length in (2, 3, 4, 99)] == [0, 2, 4, 8]


def test_data_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="written by another target"):
        load_samples([write_folder(tmp_path / "data")], vocab_size=20, target_sha256="def")
    with pytest.raises(UsageError, match="neither a data folder"):
        load_samples([tmp_path / "nothing"], vocab_size=20)


def test_vocabulary_counts_answers_only(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    kept = choose_vocabulary(samples, 3, 20, always=[19])
    # Answers: 7 8 9 | 7 7 7 3 | 2 8. So 7 four times, 8 twice; 19 because it must.
    assert kept.ids.tolist() == [7, 8, 19]
    assert kept.coverage == pytest.approx(6 / 9)
    assert (kept.d2t + torch.arange(3)).tolist() == [7, 8, 19]
    assert kept.t2d.nonzero().flatten().tolist() == [7, 8, 19]
    assert kept.own()[[7, 8, 19, 0]].tolist() == [0, 1, 2, -1]
    assert choose_vocabulary(samples, 99, 20).ids.tolist() == list(range(20))


def test_batches_hold_every_conversation_once_and_little_padding() -> None:
    lengths = torch.randint(10, 300, (500,), generator=torch.Generator().manual_seed(0))
    numbers, held = split(500, 64, seed=0)
    assert sorted([*numbers.tolist(), *held.tolist()]) == list(range(500))
    assert len(held) == 50  # a tenth
    first, again, second = (epoch_batches(lengths, numbers, 2048, seed=3, epoch=epoch) for epoch in (0, 0, 1))
    assert first == again != second
    assert sorted(n for batch in first for n in batch) == numbers.tolist()
    padded = [len(batch) * max(int(lengths[n]) for n in batch) for batch in first]
    assert max(padded) <= 2048
    assert sum(padded) < 1.1 * int(lengths[numbers].sum())
    assert pack(lengths, torch.tensor([0, 1]), 5) == [[0], [1]]  # longer than a batch may be


def test_workers_share_an_epoch() -> None:
    parts = [share([[n] for n in range(11)], rank, 4) for rank in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert len({n for part in parts for batch in part for n in batch}) == 8


def told_of(samples: Samples) -> list[str]:
    told: list[str] = []
    check_origin(samples, TargetFeatures(Letters(), (0,), torch.float32), 6, told.append)
    return told


def test_data_that_names_no_target_is_judged_by_the_target(tmp_path: Path) -> None:
    """`Letters` says the sum of all tokens so far, modulo 20."""
    npz = write_npz(tmp_path / "d.npz", TALKS, PROMPTS)
    foreign = load_samples([write_folder(tmp_path / "data"), npz], vocab_size=20)
    said, warned = told_of(foreign)  # once for all of it
    assert said.startswith("d.npz: does not say which target wrote it")
    assert "of 8 tokens of its answers 0%" in said  # cut to 6 tokens a conversation
    assert "another tokenizer" in warned
    own = [[5]]
    while len(own[0]) < 6:
        own[0].append(sum(own[0]) % 20)
    [said] = told_of(load_samples([write_npz(tmp_path / "own.npz", own, [1])], vocab_size=20))
    assert "of 5 tokens of its answers 100%" in said


def test_data_without_answers_is_not_judged(tmp_path: Path) -> None:
    assert told_of(load_samples([write_npz(tmp_path / "d.npz", [[5] * 9], [8])], vocab_size=20)) == []


def test_an_npz_may_name_its_target(tmp_path: Path) -> None:
    npz = write_npz(tmp_path / "d.npz", TALKS, PROMPTS)
    with np.load(npz) as file:
        np.savez(npz, target_sha256="abc", **file)
    samples = load_samples([npz], vocab_size=20, target_sha256="abc")
    assert told_of(samples) == []
    with pytest.raises(
        EagleError, match=r"d\.npz was written by another target: expected sha256 def…, found abc"
    ):
        load_samples([npz], vocab_size=20, target_sha256="def")


def test_a_folder_that_names_no_target_is_judged_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    (folder / "data.json").write_text("{}")
    assert len(told_of(load_samples([folder], vocab_size=20, target_sha256="abc"))) == 2
