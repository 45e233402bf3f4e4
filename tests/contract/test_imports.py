"""What may be imported where: the runtime stands alone, and command lines start fast."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import eagle_run

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(FORBIDDEN,) = (set(one["forbidden_modules"]) for one in CONTRACTS if one["type"] == "forbidden")


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    report = "import json, sys; print('\\n' + json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def runtime_modules() -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(eagle_run.__path__, "eagle_run.")]
    return ["eagle_run", *(name for name in names if not name.endswith(".__main__"))]  # those run, at once


def test_the_runtime_imports_no_exporter_and_no_model_library() -> None:
    modules = runtime_modules()
    assert len(modules) > 10
    loaded = loaded_by("".join(f"import {name}\n" for name in modules))
    assert {"eagle_export", "transformers", "onnx"} <= FORBIDDEN
    assert not loaded & FORBIDDEN
    assert {"eagle_run", "torch"} <= loaded  # it did look


def test_the_check_sees_a_forbidden_import() -> None:
    assert "onnx" in loaded_by("import eagle_run, onnx")


HEAVY = {"torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "tokenizers", "rich"}
SHOW_HELP = """
import {module} as cli, sys
sys.argv = ["x", *{arguments!r}]
try:
    cli.main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize("module", ["eagle_run.cli.main", "eagle_export.cli.main"])
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["no-such-command"]], ids=["help", "version", "wrong"]
)
def test_help_loads_nothing_heavy(module: str, arguments: list[str]) -> None:
    loaded = loaded_by(SHOW_HELP.format(module=module, arguments=arguments))
    assert "click" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_help_of_run_commands_loads_nothing_heavy(command: str) -> None:
    loaded = loaded_by(SHOW_HELP.format(module="eagle_run.cli.main", arguments=[command, "--help"]))
    assert not loaded & (HEAVY | {"numpy", "pydantic"})


@pytest.mark.parametrize(
    "command",
    ["build", "compile", "export", "data", "train", "inspect", "verify", "sensitivity", "recipes", "doctor"],
)
def test_help_of_export_commands_loads_nothing_heavy(command: str) -> None:
    loaded = loaded_by(SHOW_HELP.format(module="eagle_export.cli.main", arguments=[command, "--help"]))
    assert not loaded & HEAVY


def test_every_module_fits_its_budget() -> None:
    """One job a module, and none of more than 500 lines."""
    files = [*ROOT.glob("eagle_export/**/*.py"), *ROOT.glob("runtime/**/*.py")]
    assert len(files) > 30
    assert not {str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > 500}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens should be"),
        (["--temperature", "-1"], "temperature should be"),
        (["--top-k", "-2"], "top_k should be"),
        (["--tree", "oak"], "neither a tree nor a file"),
        (["--tree", "dynamic:2,2,4", "--draft", "sampled"], "need a tree that is fixed"),
        (["--tree", "auto", "--depth", "2"], "finds the sizes itself"),
        (["--retune"], "--retune measures for"),
        (["--stop", ""], "stop should be"),
        (["--prompt", "x", "--prompt-file", "y"], "exclude each other"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x"], "is not a bundle"),
    ],
)
def test_what_words_alone_tell_is_refused_before_torch_is_loaded(arguments: list[str], message: str) -> None:
    """Loading torch takes seconds; judged by what is imported, not by the clock."""
    words = ["generate", "no-such-bundle", *arguments]
    code = f"""
import contextlib, io, sys
from eagle_run.cli.main import run
said = io.StringIO()
with contextlib.redirect_stderr(said):
    code = run({words!r})
assert code in (1, 2), code
assert {message!r} in said.getvalue(), said.getvalue()
"""
    loaded = loaded_by(code)
    assert not loaded & {"torch", "onnxruntime", "numpy", "tokenizers"}
