from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle_run.backends import library
from eagle_run.backends.library import find_library
from eagle_run.bundle.engine_backends import RTX_CAPABILITIES
from eagle_run.errors import EagleError, UsageError


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    module = ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)


def test_rtx_is_what_it_says_it_is(rtx: Any) -> None:
    assert rtx.is_rtx
    assert rtx.label == f"tensorrt-rtx {rtx.module.__version__}"
    assert rtx.capabilities == RTX_CAPABILITIES  # what is checked without the library is what it has


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULES", {"tensorrt": "absent_trt", "tensorrt-rtx": "absent_rtx"})
    for backend, extra in (("tensorrt", "tensorrt"), ("tensorrt-rtx", "rtx")):
        with pytest.raises(EagleError, match=f"{backend} is not installed") as caught:
            find_library(backend)
        assert f"pip install 'eagle-export[{extra}]'" in caught.value.hint
    with pytest.raises(UsageError, match="found 'onnxruntime'"):
        find_library("onnxruntime")


def test_a_broken_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULES", {"tensorrt": "broken_trt"})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_trt.py").write_text("raise OSError('libnvinfer.so.11: cannot open shared object')")
    with pytest.raises(EagleError, match="cannot be imported: libnvinfer") as caught:
        find_library("tensorrt")
    assert "of your CUDA" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "good"),
    [("10.9.0.34", False), ("10.14.1", False), ("10.15.1.29", True), ("11.4.0.106", True), ("8.6.1", False)],
)
def test_versions_of_tensorrt(version: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "tensorrt", version)
    if good:
        found = find_library("tensorrt")
        assert (found.label, found.capabilities, found.is_rtx) == (f"tensorrt {version}", (), False)
        return
    with pytest.raises(EagleError, match=f"tensorrt {version} is too old: 10.15"):
        find_library("tensorrt")


def test_an_old_rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "tensorrt_rtx", "1.5.0.114")
    with pytest.raises(EagleError, match=r"is too old: 1\.7"):
        find_library("tensorrt-rtx")
