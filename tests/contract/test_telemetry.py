"""Nothing that we start collects usage data: it sends nothing and leaves nothing in the user's folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWITCHES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")
DECODE = """
import sys
from eagle_run import LLM, SamplingParams
llm = LLM(sys.argv[1], tree="chain:2", threads=1)
(output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))
print(len(output.outputs[0].token_ids))
"""


def clean_environment(home: str, **variables: str) -> dict[str, str]:
    """A user's: without our switches, and without CI, where ONNX Runtime keeps quiet anyway."""
    mine = {"CI", "XDG_CACHE_HOME", "MPLCONFIGDIR", *SWITCHES, "DO_NOT_TRACK", "ORT_RUNNING_UNIT_TESTS"}
    kept = {name: value for name, value in os.environ.items() if name not in mine}
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**kept, "HOME": home, "PYTHONPATH": path, **variables}


def python(code: str, *arguments: object, home: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=clean_environment(home, **variables),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )


def written(home: Path) -> list[str]:
    """Files below `home`, but for our own caches."""
    files = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    return sorted(name for name in files if not name.startswith(".cache/eagle-"))


@pytest.mark.parametrize("entry", ["eagle_run", "eagle_export", "eagle_run.cli.main", "benchmarks"])
def test_every_entry_sets_the_switches_and_keeps_the_users(entry: str, tmp_path: Path) -> None:
    code = f"import {entry}, json, os; print(json.dumps([os.environ[n] for n in {SWITCHES!r}]))"
    assert json.loads(python(code, home=str(tmp_path)).stdout) == ["1", "1"]
    chosen = python(code, home=str(tmp_path), ORT_DISABLE_TELEMETRY="0", HF_HUB_DISABLE_TELEMETRY="0")
    assert json.loads(chosen.stdout) == ["0", "0"]


def test_a_library_that_is_already_there_is_told(tmp_path: Path) -> None:
    """It reads its switch when it is imported. A user who set the switch is not overruled."""
    code = (
        "import sys, types\n"
        "library = types.ModuleType('onnxruntime')\n"
        "library.disable_telemetry_events = lambda: print('told')\n"
        "sys.modules['onnxruntime'] = library\n"
        "import eagle_run"
    )
    assert python(code, home=str(tmp_path)).stdout == "told\n"
    assert python(code, home=str(tmp_path), ORT_DISABLE_TELEMETRY="0").stdout == ""


def test_decoding_leaves_nothing_in_home(tiny_bundle: Path, tmp_path: Path) -> None:
    done = python(DECODE, tiny_bundle, home=str(tmp_path))
    assert (done.stdout, done.stderr) == ("8\n", "")
    assert written(tmp_path) == []


def test_decoding_says_nothing_where_home_cannot_be_written(tiny_bundle: Path) -> None:
    """/dev/null is no folder, not even for root."""
    done = python(DECODE, tiny_bundle, home="/dev/null/x")
    assert (done.stdout, done.stderr) == ("8\n", "")


def test_the_command_says_only_its_own_line(tiny_bundle: Path) -> None:
    code = "from eagle_run.cli.main import main; main()"
    done = python(
        code, "generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 8, home="/dev/null/x"
    )
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "tokens per round" in done.stderr


def test_the_picture_of_a_training_run_says_nothing_where_home_cannot_be_written(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom eagle_export.train.record import draw\n"
        "assert draw(Path(sys.argv[1]), [{'update': 1, 'loss': 2.0}])"
    )
    done = python(code, tmp_path / "curve.png", home="/dev/null/x")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert done.stderr == ""
