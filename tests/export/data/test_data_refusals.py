"""What the making of data refuses beyond the command line's own checks, each with its own words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import eagle_run.engine.graph_loading
from eagle_export.data.conversation import around_turn
from eagle_export.data.generator import GeneratorOptions, load_text, open_generator
from eagle_export.data.openings import read_openings
from eagle_export.data.settings import DataSettings
from eagle_export.data.shards import read_data
from eagle_run.bundle.loading import load_bundle
from eagle_run.errors import EagleError, UsageError
from eagle_run.special_tokens import RenderedChat


@pytest.mark.parametrize("changes", [{"openings": Path("x")}, {"turns": 2}], ids=["openings", "turns"])
def test_what_is_for_self_play_alone(changes: dict[str, Any]) -> None:
    settings = DataSettings(prompts=(Path("p.jsonl"),), **changes)
    with pytest.raises(UsageError, match="that the target writes itself") as caught:
        settings.check()
    assert caught.value.parameters == ("self_play", "openings", "turns")


@pytest.mark.parametrize(
    ("place", "length", "message"),
    [
        (GeneratorOptions(precision="fp32"), 64, "a bundle has its precision"),
        (GeneratorOptions(), 100_000, "max_seq_len 100000 passes the"),
    ],
    ids=["precision", "length"],
)
def test_what_a_bundle_cannot(place: GeneratorOptions, length: int, message: str, tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match=message):
        open_generator(str(tiny_bundle), place, length, lambda _: None)


def test_engines_have_a_largest_batch(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(backend="tensorrt", precision="fp16", device="cuda", graphs={})
    monkeypatch.setattr(eagle_run.engine.graph_loading, "load_graphs", lambda *_, **__: opened)
    most = load_bundle(tiny_bundle).manifest.limits.max_batch
    with pytest.raises(UsageError, match=f"batch {most + 1} passes the {most} that the engines"):
        open_generator(str(tiny_bundle), GeneratorOptions(batch=most + 1), 64, lambda _: None)


def test_a_bundle_that_is_replaced_while_it_is_opened(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data would be made by one target and signed by another."""
    bundle, load = shutil.copytree(tiny_bundle, tmp_path / "b"), eagle_run.engine.graph_loading.load_graphs

    def replaced(*arguments: Any, **options: Any) -> Any:
        manifest = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(json.dumps({**manifest, "name": "another"}))
        return load(*arguments, **options)

    monkeypatch.setattr(eagle_run.engine.graph_loading, "load_graphs", replaced)
    with pytest.raises(EagleError, match="was replaced while it was read"):
        open_generator(str(bundle), GeneratorOptions(), 64, lambda _: None)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EagleError, match="no readable tokenizer") as refused:
        load_text(tmp_path)
    assert "tokenizer.json" in str(refused.value.hint)


def test_a_chat_template_that_hides_the_user() -> None:
    tokenizer: Any = SimpleNamespace(render_chat=lambda messages: RenderedChat("always the same"))
    with pytest.raises(EagleError, match="does not show what the user says") as refused:
        around_turn(tokenizer, [])
    assert refused.value.parameters == ("prompts",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ('{"version": 9}', "expected version 1 of the format, found 9"),
        ("[]", "expected version 1 of the format, found list"),
    ],
)
def test_a_folder_whose_data_json_is_another(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(EagleError, match=message):
        read_data(tmp_path)


def test_a_weight_that_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "openings.txt").write_text("[one] 1.2.3\nBuy\n")
    with pytest.raises(EagleError, match=r"line 1: a section's weight is '1\.2\.3', not a number"):
        read_openings(tmp_path / "openings.txt")
