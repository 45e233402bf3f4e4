"""The reference backend: a torch module behind the Graph protocol.

Every other backend is compared with it, and the whole loop runs on it where nothing else is installed, on any
device, or on no data at all under `FakeTensorMode`. It needs neither ONNX nor anything else but torch and
Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_export.graphs.specs import draft_spec, fuse_spec, target_spec
from eagle_export.models import ops
from eagle_run.backends.base import Run
from eagle_run.backends.checks import check_tensors
from eagle_run.bundle.tensors import GraphSpec

if TYPE_CHECKING:
    from eagle_export.models.head import Draft, Fuse
    from eagle_export.models.target import TargetModule


class EagerGraph:
    """Runs `module`, whose forward takes the inputs of `spec` in order and returns its outputs in order.

    The module writes the caches that it is given in place; every other output is copied to where it is bound.
    Unlike a compiled graph it allocates while it runs; captured, it does so once.

    `groups`: query heads to a key head. `fused`: mask and cache rows are worked out once a forward, in the
    form that a GPU's fused attention takes, instead of in every layer; by default where tensors are on a GPU.
    """

    capturable = True

    def __init__(
        self, module: nn.Module, spec: GraphSpec, *, groups: int = 1, fused: bool | None = None
    ) -> None:
        self._module = module
        self._spec = spec
        self._groups = groups
        self._fused = fused

    @property
    def spec(self) -> GraphSpec:
        return self._spec

    def bind(self, tensors: Mapping[str, Tensor], *, shared: bool = False) -> Run:
        """Check `tensors` against the signature; the returned call runs the module on them.

        Raises EagleError for missing names, wrong dtypes or shapes.
        """
        check_tensors(self._spec, tensors)
        inputs = [tensors[tensor.name] for tensor in self._spec.inputs]
        outputs = [tensors[tensor.name] for tensor in self._spec.outputs]
        fused = inputs[0].is_cuda if self._fused is None else self._fused

        def run() -> None:
            with torch.no_grad():
                result = self._module(*(self._prepared(inputs) if fused else inputs))
                results = (result,) if isinstance(result, Tensor) else result
                for source, bound in zip(results, outputs, strict=True):
                    if source is not bound:  # a cache comes back as the tensor that went in
                        bound.copy_(source)

        return run

    def _prepared(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs with mask and write index as `ops` takes them from a caller that knows better."""
        named = {spec.name: tensor for spec, tensor in zip(self._spec.inputs, inputs, strict=True)}
        if (mask := named.get("tree_mask")) is not None:
            named["tree_mask"] = ops.attention_bias(mask, self._groups, named["past_key.0"].dtype)
            named["write_index"] = ops.cache_rows(named["write_index"], mask.shape[2])
        return list(named.values())


def target_graph(module: TargetModule, cache_rows: int, *, fused: bool | None = None) -> EagerGraph:
    """The target as an eager graph with caches of `cache_rows` rows."""
    groups = module.dims.heads // module.dims.kv_heads
    return EagerGraph(module, target_spec(module, cache_rows), groups=groups, fused=fused)


def fuse_graph(fuse: Fuse) -> EagerGraph:
    """EAGLE-3's fuse as an eager graph."""
    return EagerGraph(fuse, fuse_spec(fuse))


def draft_graph(draft: Draft, cache_rows: int, *, fused: bool | None = None) -> EagerGraph:
    """The draft as an eager graph with caches of `cache_rows` rows."""
    groups = draft.spec.heads // draft.spec.kv_heads
    return EagerGraph(draft, draft_spec(draft, cache_rows), groups=groups, fused=fused)
