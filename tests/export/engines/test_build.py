"""The parts of a build that need no compiling: progress, and the settings of plain TensorRT."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.enginemaker import ADA, Graphs

from eagle_export.engines.build import PhaseProgress
from eagle_export.engines.request import COMPATIBILITIES, EngineSettings

# TensorRT and TensorRT-RTX are one API: here the installed module stands in for `tensorrt`, so that what is
# set can be read back from a real config. Polygraphy takes one library per process, hence the process.
PLAIN = """
import json, sys, types
from pathlib import Path
import tensorrt_rtx
plain = types.ModuleType("tensorrt")
plain.__dict__.update({k: v for k, v in vars(tensorrt_rtx).items() if not k.startswith("__")})
plain.__version__ = "11.4.0.106"
sys.modules["tensorrt"] = plain
from eagle_export.engines.build import configure
from eagle_run.backends.library import Library
from eagle_export.engines.request import EngineRequest, EngineSettings
from eagle_run.bundle.tensors import GraphSpec, TensorSpec
from eagle_run.bundle.records import AxisRange, EngineProfile
settings = EngineSettings(
    ("9.0",), hardware_compatibility=sys.argv[1], version_compatible=sys.argv[2] == "yes",
    workspace_mib=64, optimization_level=5,
)
spec = GraphSpec("fuse", (TensorSpec("features", "float16", ("B", "T", 8)),), ())
axes = {"B": AxisRange(min=1, opt=1, max=4), "T": AxisRange(min=1, opt=3, max=16)}
request = EngineRequest(
    "tensorrt", "fuse", Path("x"), Path("y"), spec, "fp16", (EngineProfile(name="fuse", axes=axes),), settings
)


class Config:  # TensorRT-RTX takes a level of hardware compatibility and stays at none
    def __init__(self, real):
        self.__dict__.update(real=real, assigned={})

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __setattr__(self, name, value):
        self.assigned[name] = value
        setattr(self.real, name, value)


class Builder:
    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def create_builder_config(self):
        return Config(self.real.create_builder_config())


builder = Builder(plain.Builder(plain.Logger()))
network = builder.create_network(0)
tensor = network.add_input("features", plain.float16, (-1, -1, 8))
network.mark_output(network.add_identity(tensor).get_output(0))
config = configure(Library(plain, "tensorrt", plain.__version__), request, builder, network)
flags = plain.BuilderFlag
print(json.dumps({
    "compatibility": getattr(config.assigned.get("hardware_compatibility_level"), "name", None),
    "version_compatible": config.get_flag(flags.VERSION_COMPATIBLE),
    "user_allocation": config.get_flag(flags.REQUIRE_USER_ALLOCATION),
    "workspace": config.get_memory_pool_limit(plain.MemoryPoolType.WORKSPACE),
    "level": config.builder_optimization_level,
    "verbosity": config.profiling_verbosity.name,
    "profiles": config.num_optimization_profiles,
}))
"""


def plain_config(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_settings_of_plain_tensorrt_reach_its_config(rtx: Any) -> None:
    levels = rtx.module.HardwareCompatibilityLevel.__members__
    assert {name.upper() for name in COMPATIBILITIES} <= set(levels)
    found = plain_config("ampere_plus", "yes")
    assert found == {
        "compatibility": "AMPERE_PLUS",
        "version_compatible": True,
        "user_allocation": True,
        "workspace": 64 << 20,
        "level": 5,
        "verbosity": "DETAILED",
        "profiles": 1,
    }
    found = plain_config("none", "no")
    assert (found["compatibility"], found["version_compatible"]) == (None, False)


class Told:
    """Collects what `PhaseProgress` sends; the clock goes a second at each look."""

    def __init__(self, profiles: int) -> None:
        self.sent: list[tuple[float, str]] = []
        self.now = 0.0
        self.progress = PhaseProgress(self._send, profiles, clock=self._clock)

    def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(tuple(message["progress"]))

    def _clock(self) -> float:
        self.now += 1
        return self.now


def test_progress_follows_the_phase_that_takes_the_time() -> None:
    told = Told(profiles=2)
    progress = told.progress
    progress.start("Building engine", 6)
    progress.step("Building engine", 4)  # steps that take no time
    assert told.sent == [(0.0, "building engine")]
    progress.start("Computing profile costs", 10)
    assert told.sent[-1] == (0.0, "profile 1 of 2")
    progress.step("Computing profile costs", 3)  # steps 0 to 3 are done
    progress.start("Timing tactics", 2)
    progress.step("Timing tactics", 0)
    assert told.sent[-1] == (0.45, "profile 1 of 2")
    progress.finish("Timing tactics")
    progress.step("Computing profile costs", 4)
    assert told.sent[-1] == (0.5, "profile 2 of 2")
    progress.finish("Computing profile costs")
    progress.finish("Building engine")
    assert told.sent[-1] == (1.0, "profile 2 of 2")
    shares = [share for share, _ in told.sent]
    assert shares == sorted(shares)


def test_progress_is_told_four_times_a_second_at_most() -> None:
    sent: list[Any] = []
    times = iter(n / 100 for n in range(10_000))
    progress = PhaseProgress(sent.append, 1, clock=lambda: next(times))
    progress.start("Computing profile costs", 200)
    for step in range(200):
        progress.step("Computing profile costs", step)
    assert 5 <= len(sent) <= 20


@pytest.mark.slow
def test_a_timing_cache_is_kept_and_reused(rtx: Any, graphs: Callable[[str], Graphs], tmp_path: Path) -> None:
    """Straight to the compiler's process: `compile_engine` refuses a cache for TensorRT-RTX, which asks for a
    GPU when it reads one, but gets on without.
    """
    cache = tmp_path / "timing.cache"
    settings = EngineSettings((ADA,), timing_cache=cache)
    request = graphs("fp16").request("fuse", tmp_path / "e", settings=settings)
    sizes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "eagle_export.engines.worker"],
            input=json.dumps(request.to_json()),
            capture_output=True,
            text=True,
            check=True,
        )
        assert "result" in json.loads(done.stdout.splitlines()[-1])
        sizes.append(cache.stat().st_size)
    assert sizes[0] == sizes[1] > 0
