"""The part of trtdouble.py that runs: contexts, and what they are made with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eagle_run.dtypes import DTYPES
from support.trtworld import (
    STREAM,
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
    ExecutionContextAllocationStrategy,
    ILogger,
    Misuse,
    World,
)

_BY_TENSORRT = {dtype.tensorrt: dtype for dtype in DTYPES.values() if dtype.tensorrt}


class IRuntimeCache:
    """`tensorrt_rtx.IRuntimeCache`: the sets of shapes that there are kernels for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kernels: set[str] = set()

    def deserialize(self, blob: bytes) -> bool:
        made_by, _, rest = blob.decode().partition("\n")
        if made_by != f"{self._world.version} {self._world.capability}":
            return False
        self._kernels = set(rest.split("\n")) - {""}
        return True

    def serialize(self) -> bytes:
        return "\n".join([f"{self._world.version} {self._world.capability}", *sorted(self._kernels)]).encode()


class IRuntimeConfig:
    """`tensorrt_rtx.IRuntimeConfig`, with defaults that will not do."""

    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
    cuda_graph_strategy = CudaGraphStrategy.WHOLE_GRAPH_CAPTURE

    def __init__(self, world: World) -> None:
        self._world = world
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        self._cache: IRuntimeCache | None = None

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache(self._world)

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._strategy = strategy


class IExecutionContext:
    """`tensorrt.IExecutionContext`, and stricter than it."""

    def __init__(self, engine: Any, runtime: Any, config: IRuntimeConfig | None) -> None:
        if config is not None:
            eager = DynamicShapesKernelSpecializationStrategy.EAGER
            if config.dynamic_shapes_kernel_specialization_strategy is not eager:
                raise Misuse("a capture may record fallback kernels")
            if config.cuda_graph_strategy is not CudaGraphStrategy.DISABLED:
                raise Misuse("the library would capture inside a capture")
        self._engine, self._runtime, self._config = engine, runtime, config
        self._world = runtime._world
        self._profile = 0
        self._memory = (0, 0)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._changed = True  # since the last run: the next one does deferred updates

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._change("set_optimization_profile_async")
        if stream_handle != STREAM:
            raise Misuse("a profile is switched on another stream than the engine runs on")
        if profile_index >= self._engine.num_optimization_profiles:
            return False
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._change("set_device_memory")
        if memory % 256 or size < self._engine.device_memory_size_v2:
            raise Misuse(f"scratch memory of {size} bytes at {memory:#x}")
        self._memory = (memory, size)
        self._world.scratch.add(self._memory)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._change("set_input_shape")
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        if not all(a <= size <= b for a, size, b in zip(least, shape, most, strict=True)):
            self._log(f"{name} of {tuple(shape)} is not within {least} and {most}")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._change("set_tensor_address")
        if name not in self._engine._tensors:
            return False
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        missing = [name for name in self._inputs() if name not in self._shapes]
        if not missing:
            self._axes()
            self._compile()
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        axes = self._axes()
        return tuple(size if isinstance(size, int) else axes[size] for size in self._engine._tensors[name][2])

    def execute_async_v3(self, stream_handle: int) -> bool:
        world = self._world
        world.calls.append("execute_async_v3")
        if world.fail:
            self._log(world.fail)
            return False
        if stream_handle != STREAM:
            raise Misuse("the engine runs on another stream than everything else")
        if not self._memory[0]:
            raise Misuse("no scratch memory")
        if lost := set(self._engine._tensors) - set(self._addresses):
            raise Misuse(f"no address for {sorted(lost)}")
        for output, source in self._engine._data["aliases"].items():
            if self._addresses[output] != self._addresses[source]:
                raise Misuse(f"{output} is not in the memory of {source}")
        if world.capturing and self._changed:
            raise Misuse("the first run after a change of shapes is captured")
        self._changed = False
        binding = self._engine._session.io_binding()
        for name, (mode, dtype, _) in self._engine._tensors.items():
            bind = binding.bind_input if mode == "INPUT" else binding.bind_output
            shape = list(self.get_tensor_shape(name))
            bind(name, "cpu", 0, _BY_TENSORRT[dtype].onnx, shape, self._addresses[name])
        self._engine._session.run_with_iobinding(binding)
        return True

    def _change(self, call: str) -> None:
        self._world.calls.append(call)
        if self._world.capturing:
            raise Misuse(f"{call} while a round is captured")
        self._changed = True

    def _inputs(self) -> list[str]:
        return [name for name, (mode, _, _) in self._engine._tensors.items() if mode == "INPUT"]

    def _axes(self) -> dict[str, int]:
        axes: dict[str, int] = {}
        for name in self._inputs():
            for axis, size in zip(self._engine._tensors[name][2], self._shapes[name], strict=True):
                if axes.setdefault(axis, size) != size:
                    raise Misuse(f"{axis} is {axes[axis]} and {size}")
        return {axis: size for axis, size in axes.items() if isinstance(axis, str)}

    def _compile(self) -> None:
        if self._config is None or self._config._cache is None:
            return
        key = json.dumps([self._profile, self._axes()])
        if key not in self._config._cache._kernels:
            self._world.compiled += 1
            self._config._cache._kernels.add(key)

    def _log(self, message: str) -> None:
        self._runtime.logger.log(ILogger.ERROR, message)


class RtxExecutionContext(IExecutionContext):
    """`tensorrt_rtx.IExecutionContext`, which also knows whether it can be captured."""

    def is_stream_capturable(self, stream: int) -> bool:
        if stream != STREAM:
            raise Misuse("another stream than the engine runs on")
        return self._world.capturable
