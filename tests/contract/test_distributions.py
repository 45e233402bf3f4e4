"""Two distributions: eagle-run decodes and needs nothing that makes bundles; eagle-export brings it along.

Both are built the way an index gets them, through a source archive, and eagle-run is installed alone: into an
environment that sees the distributions it asks for and no other.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import PathDistribution, distribution, packages_distributions
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import Path as ZipPath
from zipfile import ZipFile, ZipInfo

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.decoding import answers_of, request_of

import eagle_run
from eagle_run.bundle.engine_backends import MODULES
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.loading import load_engine

ROOT = Path(__file__).parents[2]
PROJECTS = {"eagle-run": ROOT / "runtime", "eagle-export": ROOT}
PACKAGES = {"eagle-run": ROOT / "runtime/eagle_run", "eagle-export": ROOT / "eagle_export"}
# What only making bundles needs: modules that must not be there where only eagle-run is installed.
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(FORBIDDEN,) = (set(one["forbidden_modules"]) for one in CONTRACTS if one["type"] == "forbidden")
EXPORTER_ONLY = FORBIDDEN - {"huggingface_hub"}  # which comes along with tokenizers


def run(*command: object, **options: Any) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=300, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of this process, without what would show it other packages or an index."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Path]:
    """Distribution -> its wheel, built from its source archive alone."""
    built = {}
    for name, project in PROJECTS.items():
        out = tmp_path_factory.mktemp(name)
        run(
            sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=project, env=environment
        )
        (archive,) = out.glob("*.tar.gz")
        pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
        run(*pip, "-w", out, archive, env=environment)
        (built[name],) = out.glob("*.whl")
    return built


def metadata(wheel: Path) -> PathDistribution:
    (folder,) = [path for path in ZipPath(wheel).iterdir() if path.name.endswith(".dist-info")]
    return PathDistribution(folder)  # type: ignore[arg-type]  # a path in an archive will do


def requirements(found: PathDistribution | Any) -> list[Requirement]:
    return [Requirement(line) for line in found.requires or []]


def closure(names: list[str]) -> set[str]:
    """The installed distributions that these need to run, themselves among them; optional ones are not."""
    known: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in known:
            known.add(name)
            needed = requirements(distribution(name))
            names += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return known


def top_level(name: str) -> Iterator[Path]:
    """What a distribution put into site-packages: its modules, folders of libraries, and its metadata."""
    found = distribution(name)
    for first in {PurePosixPath(file).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        yield Path(str(found.locate_file(first)))


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path], environment: dict[str, str]
) -> Path:
    """The `bin` of a new environment that holds eagle-run and what it needs, by links into this one.

    pip resolves the wheel's requirements against the links alone: one that is missing would fail here.
    """
    folder = tmp_path_factory.mktemp("alone")
    visible = folder / "visible"
    visible.mkdir()
    needed = [one.name for one in requirements(metadata(wheels["eagle-run"])) if one.marker is None]
    for name in closure(needed):
        for source in top_level(name):
            (visible / source.name).symlink_to(source)
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv/bin/python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, env=environment).strip())
    (site / "visible.pth").write_text(f"{visible}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", wheels["eagle-run"], env=environment)
    return python.parent


# The wheels


def test_each_wheel_holds_one_package(wheels: dict[str, Path]) -> None:
    for name, package in PACKAGES.items():
        with ZipFile(wheels[name]) as wheel:
            files = {entry.filename for entry in wheel.infolist() if not ZipInfo.is_dir(entry)}
        sources = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")}
        assert sources <= files
        assert f"{package.name}/py.typed" in files
        assert any(file.endswith("/licenses/LICENSE") for file in files)
        assert {file.split("/")[0] for file in files} == {
            package.name,
            f"{package.name}-{eagle_run.__version__}.dist-info",
        }


def test_the_exporter_ships_its_recipes(wheels: dict[str, Path]) -> None:
    with ZipFile(wheels["eagle-export"]) as wheel:
        shipped = {
            name.split("/")[2] for name in wheel.namelist() if name.startswith("eagle_export/_recipes/")
        }
    assert shipped == {path.name for path in (ROOT / "recipes").iterdir()}


def test_the_runtime_has_the_licence_of_the_project() -> None:
    assert (ROOT / "runtime/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", PROJECTS)
def test_the_script_is_the_command(wheels: dict[str, Path], name: str) -> None:
    (script,) = metadata(wheels[name]).entry_points
    assert (script.group, script.name) == ("console_scripts", name)
    assert callable(script.load())


def test_both_have_one_version_and_the_exporter_asks_for_it(wheels: dict[str, Path]) -> None:
    found = {name: metadata(wheel) for name, wheel in wheels.items()}
    assert {one.version for one in found.values()} == {eagle_run.__version__}
    ours = [one for one in requirements(found["eagle-export"]) if one.name == "eagle-run"]
    assert {str(one.specifier) for one in ours} == {f"=={eagle_run.__version__}"}
    assert [one for one in ours if one.marker is None and not one.extras]


def test_what_is_installed_here_is_what_the_checkout_declares(wheels: dict[str, Path]) -> None:
    """An old editable install would make the tests below judge old metadata."""
    for name, wheel in wheels.items():
        assert set(map(str, requirements(metadata(wheel)))) == set(map(str, requirements(distribution(name))))


# What they need


def imported_by(package: Path) -> dict[str, str]:
    """Top-level module -> one of the files that import it, at the top or inside of functions."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                names = [node.module or ""]
            else:
                continue
            found |= {name.split(".")[0]: path.name for name in names}
    return found


@pytest.mark.parametrize("name", PROJECTS)
def test_every_import_has_its_requirement(wheels: dict[str, Path], name: str) -> None:
    required = {
        canonicalize_name(one.name) for one in requirements(metadata(wheels[name])) if one.marker is None
    }
    providers = {**packages_distributions(), "eagle_run": ["eagle-run"]}  # an editable one lists no modules
    imports = imported_by(PACKAGES[name])
    assert {"torch", "click"} <= set(imports)
    own = {PACKAGES[name].name, *sys.stdlib_module_names}
    undeclared = {
        module: file
        for module, file in imports.items()
        if module not in own and not required & {canonicalize_name(one) for one in providers.get(module, [])}
    }
    assert not undeclared


def test_the_runtime_asks_for_nothing_of_the_exporter(wheels: dict[str, Path]) -> None:
    providers = packages_distributions()
    unwanted = {canonicalize_name(one) for module in EXPORTER_ONLY for one in providers.get(module, [])}
    assert len(unwanted) >= len(EXPORTER_ONLY) - 1  # all are installed here, but for the editable one
    every = [one.name for one in requirements(metadata(wheels["eagle-run"]))]
    assert not unwanted & set(map(canonicalize_name, every))
    plain = [one.name for one in requirements(metadata(wheels["eagle-run"])) if one.marker is None]
    assert not unwanted & closure(plain)


def test_engines_have_extras_in_both(wheels: dict[str, Path]) -> None:
    """An extra for each library that runs engines; the exporter's are those of the runtime."""
    found = {name: metadata(wheel) for name, wheel in wheels.items()}
    extras = set(found["eagle-run"].metadata.get_all("Provides-Extra") or [])
    assert extras == {"tensorrt", "rtx", "gpu"}
    for extra in extras:
        active = [
            {str(one).partition(";")[0].strip() for one in requirements(dist) if holds(one, extra)}
            for dist in found.values()
        ]
        assert len(active[0]) >= 1
        assert active[1] == {f"eagle-run[{extra}]=={eagle_run.__version__}"}
    libraries = {one.name.replace("-", "_") for one in requirements(found["eagle-run"])}
    assert set(MODULES.values()) <= libraries


def holds(requirement: Requirement, extra: str) -> bool:
    """Is it one that this extra adds?"""
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def test_constraints_pin_every_requirement() -> None:
    """`make venv` installs the same versions tomorrow. TensorRT is for GPUs and not part of it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    asked = set()
    for project in PROJECTS.values():
        table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        groups = [table["dependencies"], *table["optional-dependencies"].values()]
        asked |= {canonicalize_name(Requirement(line).name) for group in groups for line in group}
    assert asked - pinned == {"eagle-run", "tensorrt", "onnxruntime-gpu"}


# eagle-run alone

LOOK = """
import importlib, importlib.util, json, pkgutil, sys, eagle_run
modules = [one.name for one in pkgutil.walk_packages(eagle_run.__path__, "eagle_run.")]
modules = [name for name in modules if not name.endswith("__main__")]
for name in modules:
    importlib.import_module(name)
absent = [name for name in json.loads(sys.argv[1]) if importlib.util.find_spec(name) is None]
print(json.dumps([eagle_run.__file__, modules, absent]))
"""


@pytest.mark.slow
def test_alone_it_imports_and_the_exporters_libraries_are_not_there(
    alone: Path, environment: dict[str, str]
) -> None:
    wanted = json.dumps(sorted(EXPORTER_ONLY))
    where, modules, absent = json.loads(run(alone / "python", "-P", "-c", LOOK, wanted, env=environment))
    assert Path(where).is_relative_to(alone.parent)
    assert len(modules) > 30
    assert set(absent) == EXPORTER_ONLY
    here = [name for name in EXPORTER_ONLY if importlib.util.find_spec(name)]
    assert set(here) == EXPORTER_ONLY  # the look would have seen them


@pytest.mark.slow
def test_alone_it_answers_a_prompt(alone: Path, environment: dict[str, str], tiny_bundle: Path) -> None:
    generate = (alone / "eagle-run", "generate", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 30)
    done = json.loads(run(*generate, "--json", env=environment))
    engine = load_engine(tiny_bundle, threads=1)
    (plain,) = answers_of(engine, [request_of(engine, "hello", max_new_tokens=30)], TreeShape.plain())
    assert done["text"] == plain.text


@pytest.mark.slow
def test_alone_it_says_its_version(alone: Path, environment: dict[str, str]) -> None:
    shown = run(alone / "eagle-run", "--version", env=environment)
    assert shown == f"eagle-run {eagle_run.__version__}\n"
