"""One process, or several under torchrun that train together: through accelerate, one GPU each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.device import device_named, multiplies_bf16


class Workers:
    """This process among those that train. `first` alone writes files and talks to the user."""

    def __init__(self, device: str = "auto") -> None:
        from accelerate import Accelerator

        self._accelerator: Any = Accelerator(cpu=device_named(device).type == "cpu")
        self.device: torch.device = self._accelerator.device
        self.count: int = self._accelerator.num_processes
        self.rank: int = self._accelerator.process_index

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose gradients all workers share."""
        if self.count == 1:
            return module.to(self.device)
        return self._accelerator.prepare_model(module)

    def no_sync(self, module: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients of all but the last forward of an update stay here."""
        return nullcontext() if last or self.count == 1 else self._accelerator.no_sync(module)

    def total(self, values: Tensor) -> Tensor:
        """The sum over workers."""
        return values if self.count == 1 else self._accelerator.reduce(values, reduction="sum")

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()

    def close(self) -> None:
        if self.count > 1:
            self._accelerator.end_training()


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 where `precision` says so, or "auto" and the hardware multiplies it faster; else None."""
    if precision == "auto":
        return torch.bfloat16 if multiplies_bf16(device) else None
    return torch.bfloat16 if precision == "bf16" else None
