"""What can go wrong around the compiler: each says what to do, and nothing half-made is left."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.enginemaker import Graphs

from eagle_export.engines.compile import compile_engine
from eagle_export.engines.request import EngineRequest, EngineSettings
from eagle_export.graphs.target import export_target
from eagle_run.errors import EagleError, UsageError


def script(text: str) -> tuple[str, ...]:
    """A compiler's process that reads its request and then does as told."""
    return (sys.executable, "-c", f"import json, os, sys\nrequest = json.load(sys.stdin)\n{text}")


@pytest.fixture
def request_(graphs: Callable[[str], Graphs], tmp_path: Path) -> EngineRequest:
    """A small one (the fuse graph), with an older engine in its place."""
    out = tmp_path / "engines" / "fuse.engine"
    out.parent.mkdir()
    out.write_bytes(b"older")
    return graphs("fp16").request("fuse", out)


def untouched(request: EngineRequest) -> bool:
    """The older engine is as it was, alone, and no process is left."""
    names = [path.name for path in request.out.parent.iterdir()]
    return names == [request.out.name] and request.out.read_bytes() == b"older" and not children()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]


PART = "open(request['out'], 'wb').write(b'half an engine')\n"


def test_a_killed_compiler_means_too_little_memory(request_: EngineRequest) -> None:
    with pytest.raises(EagleError, match=r"memory ran out: about 0\.5 GB are needed") as caught:
        compile_engine(request_, command=script(PART + "os.kill(os.getpid(), 9)"))
    assert "swap" in caught.value.hint
    assert untouched(request_)


def test_memory_that_python_is_refused(request_: EngineRequest) -> None:
    with pytest.raises(EagleError, match="memory ran out"):
        compile_engine(request_, command=script("print(json.dumps({'error': {'kind': 'memory'}}))"))
    assert untouched(request_)


def test_a_crash_of_the_library_says_its_last_words(request_: EngineRequest) -> None:
    crash = PART + "print(json.dumps({'log': 'Myelin is unwell'}), flush=True)\n"
    crash += "import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)"
    with pytest.raises(EagleError, match=r"crashed \(SIGSEGV\).*last words: Myelin is unwell") as caught:
        compile_engine(request_, command=script(crash))
    assert "Segmentation fault" in caught.value.hint
    assert untouched(request_)


def test_a_process_that_ends_with_no_word(request_: EngineRequest) -> None:
    with pytest.raises(EagleError, match="exit code 3") as caught:
        compile_engine(request_, command=script("sys.exit('no such device' if False else 3)"))
    assert "please report" in caught.value.hint
    with pytest.raises(EagleError, match="exit code 1") as caught:
        compile_engine(request_, command=(sys.executable, "-c", "raise RuntimeError('a reason')"))
    assert "RuntimeError: a reason" in caught.value.hint
    assert untouched(request_)


def test_a_full_disk(request_: EngineRequest, rtx: object) -> None:
    """The real compiler, whose file is a device that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("this platform has no /dev/full")
    part = request_.out.with_name(f".{request_.out.name}.{os.getpid()}.part")
    part.symlink_to("/dev/full")
    with pytest.raises(EagleError, match="no space is left") as caught:
        compile_engine(request_)
    assert "free some disk space" in caught.value.hint
    assert untouched(request_)


def test_the_compiler_is_killed_while_it_works(
    rtx: object, graphs: Callable[[str], Graphs], tmp_path: Path
) -> None:
    def kill(share: float, what: str) -> None:
        for child in children():
            child.kill()

    request = graphs("fp16").request("target", tmp_path / "e")
    with pytest.raises(EagleError, match="was ended while it compiled the target graph"):
        compile_engine(request, kill)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_the_compiler(rtx: object, graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    def interrupt(share: float, what: str) -> None:
        assert len(children()) == 1
        raise KeyboardInterrupt

    out = tmp_path / "e"
    out.write_bytes(b"older")
    request = graphs("fp16").request("target", out)
    with pytest.raises(KeyboardInterrupt):
        compile_engine(request, interrupt)
    assert untouched(request)


def test_ctrl_c_on_a_terminal(rtx: object, graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    """SIGINT goes to both processes at once: Python says KeyboardInterrupt once, and both end."""
    (tmp_path / "request.json").write_text(
        json.dumps(graphs("fp16").request("target", tmp_path / "e").to_json())
    )
    program = (
        "import json, sys\n"
        "from eagle_export.engines.compile import compile_engine\n"
        "from eagle_export.engines.request import EngineRequest\n"
        "request = EngineRequest.from_json(json.load(open(sys.argv[1])))\n"
        "compile_engine(request, lambda share, what: print(what, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "request.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()  # it has begun
    (compiler,) = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert process.stderr.read().count("KeyboardInterrupt") == 1
    assert not compiler.is_running()
    assert [path.name for path in tmp_path.iterdir()] == ["request.json"]
    process.stdout.close()
    process.stderr.close()


def test_the_compiler_ends_when_its_parent_is_gone(
    rtx: object, graphs: Callable[[str], Graphs], tmp_path: Path
) -> None:
    request = graphs("fp16").request("target", tmp_path / "e")
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_export.engines.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request.to_json()))
    process.stdin.close()
    process.stdout.readline()
    process.stdout.close()  # as the kernel does for a parent that was killed
    assert process.wait(timeout=60) == 1


def test_places_that_cannot_be_written_are_found_before_compiling(
    request_: EngineRequest, tmp_path: Path
) -> None:
    never = script("raise AssertionError('it was started')")
    (tmp_path / "file").write_text("")
    with pytest.raises(EagleError, match="e cannot be written") as caught:
        compile_engine(replace(request_, out=tmp_path / "file" / "e"), command=never)
    assert caught.value.parameters == ("out",)
    with pytest.raises(EagleError, match="cannot be written: Is a directory"):
        compile_engine(replace(request_, out=tmp_path), command=never)
    settings = EngineSettings(("9.0",), timing_cache=tmp_path / "file" / "cache")
    with pytest.raises(EagleError, match="cache cannot be written") as caught:
        compile_engine(replace(request_, backend="tensorrt", settings=settings), command=never)
    assert caught.value.parameters == ("timing_cache",)
    with pytest.raises(EagleError, match=r"absent\.onnx does not exist"):
        compile_engine(replace(request_, onnx=tmp_path / "absent.onnx"), command=never)
    assert untouched(request_)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (EngineSettings(("8.9",), hardware_compatibility="ampere_plus"), "for TensorRT;"),
        (EngineSettings(("8.9",), version_compatible=True), "for TensorRT;"),
        (EngineSettings(("8.9",), timing_cache=Path("cache")), "for TensorRT;"),
        (EngineSettings(("8.9",), hardware_compatibility="all"), "one of none, ampere_plus"),
        (EngineSettings(("8.9",), optimization_level=6), "0 to 5, found 6"),
        (EngineSettings(("8.9",), workspace_mib=0), "at least 1 MiB"),
        (EngineSettings(()), "at least one compute capability"),
    ],
)
def test_settings_that_the_backend_does_not_have(
    settings: EngineSettings, reason: str, request_: EngineRequest
) -> None:
    with pytest.raises(UsageError, match=reason):
        compile_engine(replace(request_, settings=settings), command=script("raise AssertionError"))
    assert untouched(request_)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed")
def test_a_missing_library_comes_out_of_the_compilers_process(request_: EngineRequest) -> None:
    with pytest.raises(EagleError, match="tensorrt is not installed") as caught:
        compile_engine(replace(request_, backend="tensorrt"))
    assert "eagle-export[tensorrt]" in caught.value.hint
    assert untouched(request_)


def test_a_graph_that_cannot_be_read_names_the_layer(
    rtx: object, request_: EngineRequest, graphs: Callable[[str], Graphs], tmp_path: Path
) -> None:
    import onnx

    model = onnx.load(graphs("fp16").folder / "fuse.onnx")
    model.graph.node[0].op_type = "Det"
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(EagleError, match=r"node 'fc/MatMul' \(Det\) of the model's layer fc"):
        compile_engine(replace(request_, onnx=tmp_path / "bad.onnx"))
    assert untouched(request_)


def test_heads_without_a_fused_attention(rtx: object, tmp_path: Path) -> None:
    """Heads of 8 values: the library's message is opaque, ours says what it is."""
    import torch
    from support.tiny import Sizes, modules_of, write_target

    target = write_target(tmp_path / "target", Sizes(hidden=16, heads=2, kv_heads=1, layers=1))
    module = modules_of(target).target.half()
    spec = export_target(module, tmp_path / "target.onnx", cache_rows=192)
    assert spec.inputs[-1].shape[-1] == 8
    assert next(module.parameters()).dtype == torch.float16
    request = Graphs(tmp_path, {"target": spec}, "fp16").request(
        "target", tmp_path / "out" / "e", names=("verify",)
    )
    with pytest.raises(EagleError, match="cannot compile the target graph") as caught:
        compile_engine(request)
    assert "heads of 8 values" in caught.value.hint
    assert list((tmp_path / "out").iterdir()) == []
