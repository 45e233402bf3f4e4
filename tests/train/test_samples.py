"""Data on its way in: shards, masks, vocabularies, batches, and the cache of features."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainset import write_npz

from eagle_export.train import features
from eagle_export.train.batches import epoch_batches, pack, share, split
from eagle_export.train.features import Cached, OnTheFly, TargetFeatures, cache_file, fill
from eagle_export.train.samples import Samples, load_samples
from eagle_export.train.vocab import choose_vocabulary
from eagle_run.errors import EagleError, UsageError

TALKS = [[5, 6, 7, 8, 9], [5, 6, 7, 7, 7, 7, 3], [1, 2, 8]]
PROMPTS = [2, 3, 1]


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


class Letters:
    """A target whose hidden states tell what it has seen: token, position, and the sum so far."""

    device = torch.device("cpu")
    dtype = torch.float32
    config = SimpleNamespace(hidden_size=2)
    calls = 0

    def model(self, input_ids: torch.Tensor, **_: Any) -> Any:
        Letters.calls += 1
        place = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        last = torch.stack((input_ids.cumsum(1), place), -1).float()
        states = tuple(torch.stack((input_ids * scale, place), -1).float() for scale in (1, 2, 3))
        return SimpleNamespace(hidden_states=states, last_hidden_state=last)

    def get_output_embeddings(self) -> Any:
        return lambda rows: torch.nn.functional.one_hot(rows[:, 0].long() % 20, 20).float()


def cached(samples: Samples, folder: Path, length: int = 6) -> tuple[Cached, list[Path]]:
    target = TargetFeatures(Letters(), (0, 2), torch.float32)
    files = [cache_file(folder, shard, "abc", target, max_length=length) for shard in samples.shards]
    fill(folder, samples, files, target, lambda *_: None, max_length=length)
    return Cached(samples, files, length), files


def test_cached_features_are_those_of_the_target(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    source, _ = cached(samples, tmp_path / "cache")
    direct = OnTheFly(samples, TargetFeatures(Letters(), (0, 2), torch.float32), 6)
    batches = [s.batch([2, 1], torch.device("cpu")) for s in (source, direct)]
    for batch in batches:
        assert batch.tokens.tolist() == [[1, 2, 8, 0, 0, 0], [5, 6, 7, 7, 7, 7]]  # cut to 6
        assert batch.features[1, 2].tolist() == [7, 2, 21, 2]
        assert batch.last[0, :3, 0].tolist() == [1, 3, 11]
        assert batch.best[0, :2].tolist() == [1, 3]
        assert batch.best[1, 2:5].tolist() == [18, 25 % 20, 32 % 20]
        assert not batch.answers[0, 3:].any()


def test_the_cache_is_reused_and_grows_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_samples([write_npz(tmp_path / "a.npz", TALKS, PROMPTS)], vocab_size=20)
    _, files = cached(first, tmp_path / "cache")
    calls = Letters.calls
    cached(first, tmp_path / "cache")
    assert Letters.calls == calls
    more = write_npz(tmp_path / "b.npz", TALKS[::-1], PROMPTS[::-1])
    both = load_samples([tmp_path / "a.npz", more], vocab_size=20)
    _, grown = cached(both, tmp_path / "cache")
    assert grown[0] == files[0]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert load_file(grown[1])["best"].dtype == torch.int32
    other = TargetFeatures(Letters(), (1, 2), torch.float32)
    assert cache_file(tmp_path, first.shards[0], "abc", other, max_length=6) != files[0]
    assert cache_file(tmp_path, replace(first.shards[0]), "abd", other, max_length=6) != files[0]
    monkeypatch.setattr(features, "free_space", lambda _: 10)
    with pytest.raises(EagleError, match="are free"):
        cached(first, tmp_path / "elsewhere")


def test_a_cache_of_shorter_conversations_is_not_taken_for_longer_ones(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    cached(samples, tmp_path / "cache", 3)
    source, files = cached(samples, tmp_path / "cache", 6)
    direct = OnTheFly(samples, TargetFeatures(Letters(), (0, 2), torch.float32), 6)
    batches = [s.batch([2, 1], torch.device("cpu")) for s in (source, direct)]
    assert torch.equal(batches[0].features[1], batches[1].features[1])
    whole, longer = (cached(samples, tmp_path / "cache", length)[1] for length in (7, 99))
    assert whole == longer != files  # nothing is cut off, so one file serves both
