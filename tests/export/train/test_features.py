"""The cache of features: what a target says, kept, found again, and read by heads that want less of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainset import PROMPTS, TALKS, Letters, write_npz

from eagle_export.train import features
from eagle_export.train.features import Cached, OnTheFly, TargetFeatures, cache_files, fill_cache
from eagle_export.train.samples import Samples, load_samples
from eagle_run.errors import EagleError


def cached(
    samples: Samples, folder: Path, length: int = 6, layers: tuple[int, ...] = (0, 2)
) -> tuple[Cached, list[Path]]:
    target = TargetFeatures(Letters(), layers, torch.float32)
    fill_cache(folder, samples, "abc", target, lambda *_: None, max_length=length)
    files = cache_files(folder, samples, "abc", target, max_length=length)
    return Cached(samples, files, layers, length), files


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
    assert cache_files(tmp_path, first, "abc", other, max_length=6) != files
    same = TargetFeatures(Letters(), (0, 2), torch.float32)
    assert cache_files(tmp_path, first, "abd", same, max_length=6) != files
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


def test_a_cache_with_more_layers_serves_heads_that_read_fewer(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    _, wide = cached(samples, tmp_path / "cache", layers=(0, 1, 2))
    calls = Letters.calls
    for layers in ((0,), (1, 2), (0, 2), (0, 1, 2)):
        source, files = cached(samples, tmp_path / "cache", layers=layers)
        assert files == wide
        assert Letters.calls == calls  # nothing is computed
        direct = OnTheFly(samples, TargetFeatures(Letters(), layers, torch.float32), 6)
        found, expected = (s.batch([2, 1], torch.device("cpu")) for s in (source, direct))
        calls = Letters.calls
        places = found.tokens > 0  # padding is zero in one and computed in the other
        assert torch.equal(found.features[places], expected.features[places])
        assert torch.equal(found.last[places], expected.last[places])
        assert found.features.shape == expected.features.shape
    assert cached(samples, tmp_path / "cache", 3, layers=(0,))[1] != wide  # of other conversations


def test_a_cache_of_fewer_layers_does_not_serve_more(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    _, narrow = cached(samples, tmp_path / "cache", layers=(1,))
    (tmp_path / "cache" / "damaged.safetensors").write_bytes(b"no such file")
    assert cached(samples, tmp_path / "cache", layers=(1, 2))[1] != narrow
    assert cached(samples, tmp_path / "cache", layers=(1,))[1] == narrow  # the very file comes first


def test_a_cache_from_before_files_named_their_layers_is_taken(tmp_path: Path) -> None:
    samples = load_samples([write_npz(tmp_path / "d.npz", TALKS, PROMPTS)], vocab_size=20)
    _, files = cached(samples, tmp_path / "cache")
    save_file(load_file(files[0]), files[0])  # without metadata
    calls = Letters.calls
    source, again = cached(samples, tmp_path / "cache")
    assert (again, Letters.calls) == (files, calls)
    assert source.batch([1], torch.device("cpu")).features[0, 2].tolist() == [7, 2, 21, 2]
    assert cached(samples, tmp_path / "cache", layers=(0,))[1] != files  # which layers it has is not known
