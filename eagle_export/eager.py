"""The reference backend: a torch module behind the Graph protocol.

Every other backend is compared with it, and the whole loop runs on it where nothing else is installed, on any
device, or on no data at all under `FakeTensorMode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_run.backends.base import GraphSpec, Run
from eagle_run.backends.checks import check_tensors

if TYPE_CHECKING:
    from eagle_export.models.head import Draft, Fuse
    from eagle_export.models.target import TargetModule


class EagerGraph:
    """Runs `module`, whose forward takes the inputs of `spec` in order and returns its outputs in order.

    The module writes the caches that it is given in place; every other output is copied to where it is bound.
    Unlike a compiled graph it allocates while it runs.
    """

    def __init__(self, module: nn.Module, spec: GraphSpec) -> None:
        self._module = module
        self._spec = spec

    @property
    def spec(self) -> GraphSpec:
        return self._spec

    def bind(self, tensors: Mapping[str, Tensor]) -> Run:
        """Check `tensors` against the signature; the returned call runs the module on them.

        Raises EagleError for missing names, wrong dtypes or shapes.
        """
        check_tensors(self._spec, tensors)
        inputs = [tensors[tensor.name] for tensor in self._spec.inputs]
        outputs = [tensors[tensor.name] for tensor in self._spec.outputs]

        def run() -> None:
            with torch.no_grad():
                result = self._module(*inputs)
                results = (result,) if isinstance(result, Tensor) else result
                for source, bound in zip(results, outputs, strict=True):
                    if source is not bound:  # a cache comes back as the tensor that went in
                        bound.copy_(source)

        return run


def target_graph(module: TargetModule, cache_rows: int) -> EagerGraph:
    """The target as an eager graph with caches of `cache_rows` rows."""
    from eagle_export.graphs.target import target_spec

    return EagerGraph(module, target_spec(module, cache_rows))


def fuse_graph(fuse: Fuse) -> EagerGraph:
    """EAGLE-3's fuse as an eager graph."""
    from eagle_export.graphs.fuse import fuse_spec

    return EagerGraph(fuse, fuse_spec(fuse))


def draft_graph(draft: Draft, cache_rows: int) -> EagerGraph:
    """The draft as an eager graph with caches of `cache_rows` rows."""
    from eagle_export.graphs.draft import draft_spec

    return EagerGraph(draft, draft_spec(draft, cache_rows))
