"""What the tests of `eagle-export data` share: tiny targets that talk, and the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.datamaker import Cli, Outcome, generator_of

from eagle_export.cli.main import run
from eagle_export.data.generator import Generator


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process."""

    def call(*arguments: object) -> Outcome:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def talking_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a chat template that ends every turn with </s>, as those of real models do."""
    folder = tmp_path_factory.mktemp("talking") / "target"
    shutil.copytree(tiny_target, folder)
    template = (
        "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    where = folder / "tokenizer_config.json"
    where.write_text(json.dumps({**json.loads(where.read_text()), "chat_template": template}))
    return folder


@pytest.fixture(scope="session")
def generator(talking_target: Path) -> Generator:
    return generator_of(talking_target)
