"""The TensorRT backend decodes the tokens of ONNX Runtime, through a strict stand-in for the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoding import request_of, run
from support.tinybundle import make_bundle
from support.trtdouble import STREAM, Misuse, World, add_engines, double_gpu, make_library, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_run.backends.tensorrt import TensorRTGraph, load_engines
from eagle_run.bundle.loading import Bundle, load_bundle
from eagle_run.decoding.tree import TreeShape
from eagle_run.engine.cuda_graphs import CudaGraphRunner
from eagle_run.engine.engine import Engine
from eagle_run.engine.loading import load_engine
from eagle_run.errors import EagleError
from eagle_run.params import SamplingParams

SHAPES = (TreeShape.plain(), TreeShape.chain(2), TreeShape.dynamic(3, 3, 8))
PROMPTS = ("hello there", "a much longer prompt than a chunk of sixteen, so that it takes several", "x")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with stand-in engines of both libraries. Do not write into it."""
    root = make_bundle(tmp_path_factory.mktemp("engines") / "tiny")
    add_engines(root, "tensorrt-rtx", ("8.9", "12.0"))
    add_engines(root, "tensorrt", ("9.0",))
    return root


def answers(engine: Engine, shape: TreeShape, temperature: float = 0.0) -> list[list[int]]:
    sampling = SamplingParams(temperature=temperature, seed=3)
    requests = [request_of(engine, text, sampling=sampling, max_new_tokens=12) for text in PROMPTS]
    return run(engine, requests, shape).token_ids


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("backend", "capability"), [("tensorrt-rtx", "12.0"), ("tensorrt", "9.0")])
def test_tokens_are_those_of_onnx_runtime(
    engines: Path, world: World, backend: str, capability: str, batch: int
) -> None:
    world.capability = capability
    expected = load_engine(engines, backend="onnxruntime", device="cpu", threads=1, batch=batch)
    engine = load_engine(engines, batch=batch)
    assert (engine.backend, expected.backend) == (backend, "onnxruntime")
    for shape in SHAPES:
        for temperature in (0.0, 0.8):
            assert answers(engine, shape, temperature) == answers(expected, shape, temperature)
    assert len(world.contexts) > 4
    assert len(world.scratch) == 1  # one memory for all contexts of all engines, which never moves


class Replaying:
    """A recorder for CudaGraphRunner: a replay does the work, in a world where nothing may change."""

    def __init__(self, world: World) -> None:
        self.world = world

    def record(self, function: Callable[[], None]) -> tuple[Any, int]:
        world = self.world

        class Recording:
            def replay(self) -> None:
                world.capturing = True
                try:
                    function()
                finally:
                    world.capturing = False

            def reset(self) -> None:
                pass

        return Recording(), 0


def test_rounds_can_be_captured(engines: Path, world: World) -> None:
    """From its second time on a round only enqueues: no shape, address, profile or memory is set."""
    engine = load_engine(engines)
    rounds = CudaGraphRunner("cpu", recorder=Replaying(world))
    engine = Engine(engine.runner, engine.limits, tokenizer=engine.tokenizer, cuda_graphs=rounds)
    requests = [request_of(engine, text, max_new_tokens=30) for text in PROMPTS]
    for shape in SHAPES:
        plain = run(engine, requests, TreeShape.plain()).token_ids
        assert run(engine, requests, shape).token_ids == plain
    assert rounds.replays > 20


@pytest.fixture
def loaded(engines: Path, world: World) -> TensorRTGraph:
    return load(load_bundle(engines), world)


def load(bundle: Bundle, world: World, graph: Any = "target", backend: Any = "tensorrt-rtx") -> TensorRTGraph:
    artifact = bundle.artifact(graph, backend, world.capability)
    library = make_library(world, backend)
    graphs = load_engines(library, [(bundle.file(artifact), artifact)], double_gpu(world.capability))
    found = graphs[graph]
    assert isinstance(found, TensorRTGraph)
    return found


class NoTorch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} while an engine runs")


def test_a_run_is_one_call(loaded: TensorRTGraph, world: World) -> None:
    """It makes no tensor, waits for nothing and sets nothing."""
    bound = tensors(loaded)
    run = loaded.bind(bound)
    world.calls.clear()
    with NoTorch():
        run()
        run()
    assert world.calls == ["execute_async_v3"] * 2
    assert bound["logits"].abs().sum() > 0


def test_each_set_of_shapes_has_its_context(loaded: TensorRTGraph, world: World) -> None:
    runs = [loaded.bind(tensors(loaded, T=rows, R=rows)) for rows in (1, 2, 3)]
    assert [context.active_optimization_profile for context in world.contexts] == [2, 1, 1]
    for one in runs:
        one()
    world.capturing = True
    for one in runs:
        one()


def test_a_first_run_must_not_be_captured(loaded: TensorRTGraph, world: World) -> None:
    run = loaded.bind(tensors(loaded))
    world.capturing = True
    with pytest.raises(Misuse, match="first run"):
        run()


def test_shared_bindings_change_one_context(loaded: TensorRTGraph, world: World) -> None:
    """Both ways give the same numbers; shapes are set only where another binding ran before."""
    torch.manual_seed(0)
    pairs = []
    for rows in (4, 8):
        first = tensors(loaded, T=rows, R=1)
        first["input_ids"].copy_(torch.randint(0, 256, first["input_ids"].shape))
        second = {name: value.clone() for name, value in first.items()}
        for name in second:
            if name.startswith("present_"):
                second[name] = second[name.replace("present", "past")]
        pairs.append((loaded.bind(first, shared=True), first, loaded.bind(second), second))
    assert len(world.contexts) == 3
    for shared, first, own, second in (*pairs, *pairs):
        shared()
        own()
        assert torch.equal(first["logits"], second["logits"])
        world.calls.clear()
        shared()
        assert world.calls == ["execute_async_v3"]
    world.capturing = True
    with pytest.raises(Misuse, match="set_input_shape while"):
        pairs[0][0]()


def test_sizes_that_no_profile_holds(loaded: TensorRTGraph) -> None:
    with pytest.raises(
        EagleError, match=r"no profile for .*T 65.*verify \(B 1–4, KV 1–288, T 1–64"
    ) as caught:
        loaded.bind(tensors(loaded, T=65, R=65))
    assert "eagle-export compile" in caught.value.hint


def test_past_and_present_are_one_tensor(loaded: TensorRTGraph) -> None:
    bound = tensors(loaded)
    bound["present_key.0"] = bound["past_key.0"].clone()
    with pytest.raises(EagleError, match=r"past_key\.0 and present_key\.0 must be one tensor"):
        loaded.bind(bound)


def test_tensors_of_another_type_or_shape(loaded: TensorRTGraph) -> None:
    bound = tensors(loaded)
    with pytest.raises(EagleError, match="input_ids: expected int64"):
        loaded.bind({**bound, "input_ids": bound["input_ids"].int()})
    with pytest.raises(EagleError, match="expected R = 2"):
        loaded.bind({**bound, "logits": torch.zeros(1, 3, 257)})


def test_what_the_library_says_is_what_the_user_reads(loaded: TensorRTGraph, world: World) -> None:
    run = loaded.bind(tensors(loaded))
    world.fail = "Error Code 2: OutOfMemory (no further information)"
    with pytest.raises(EagleError, match="cannot run the target engine: Error Code 2: OutOfMemory"):
        run()


def test_an_engine_that_cannot_be_captured(loaded: TensorRTGraph, world: World) -> None:
    assert loaded.capturable
    world.capturable = False
    loaded.bind(tensors(loaded))
    assert not loaded.capturable


def test_scratch_is_aligned_and_as_large_as_the_largest_need(engines: Path, world: World) -> None:
    graph = load(load_bundle(engines), world)
    graph.bind(tensors(graph))
    ((address, size),) = world.scratch
    assert (address % 256, size) == (0, 1002)  # three profiles, of 1000, 1001 and 1002 bytes


def test_the_stream_is_asked_for_at_every_run(engines: Path, world: World) -> None:
    """torch's current stream differs inside a capture and outside."""
    from dataclasses import replace

    bundle = load_bundle(engines)
    artifact = bundle.artifact("target", "tensorrt-rtx", "8.9")
    asked: list[int] = []
    gpu = replace(double_gpu(), stream=lambda: asked.append(STREAM) or STREAM)  # type: ignore[func-returns-value]
    graph = load_engines(make_library(world), [(bundle.file(artifact), artifact)], gpu)["target"]
    run = graph.bind(tensors(graph))  # type: ignore[arg-type]
    before = len(asked)
    run()
    run()
    assert len(asked) == before + 2
