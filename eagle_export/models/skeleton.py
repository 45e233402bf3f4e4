"""Models without weights, for tracing, and for each of their weights where it is: nothing is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.checkpoints import weights
from eagle_export.checkpoints.stored import stored_tensors
from eagle_export.checkpoints.weight_stream import InMemory, Weight
from eagle_export.models.recorded import Recorded


def load_recorded(folder: Path, dtype: torch.dtype) -> Any:
    """`load_target` with tensors that are `Recorded`: of the same folders, with the same errors.

    Only headers of safetensors files are read. A folder of torch's .bin files has none: it is loaded.
    """
    from eagle_export.checkpoints.fp8_checkpoint import read_checkpoint
    from eagle_export.models.target import load_target, load_tensors

    files = _files(folder)
    if not files:
        return load_target(folder, dtype)
    checkpoint = read_checkpoint(folder)
    stored: Mapping[str, Weight]
    if checkpoint is not None:
        stored = checkpoint.weights(dtype)
    else:
        stored = {name: tensor for file in files for name, tensor in stored_tensors(file).items()}
    return load_tensors(folder, {name: Recorded(weight) for name, weight in stored.items()}, dtype)


def hollow(module: nn.Module) -> dict[str, Weight]:
    """Moves a module's parameters and buffers to the meta device, in place; returns what they held, by name.

    What the module has under several names (tied weights) stays shared, and is there under each.
    """
    held: dict[str, Tensor] = {}
    empty: dict[int, Tensor] = {}  # by what was there: what is shared stays shared
    parts = list(module.named_modules(remove_duplicate=False))
    for prefix, part in parts:
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                held[f"{prefix}.{name}" if prefix else name] = tensor
    for tensor in held.values():
        if id(tensor) not in empty:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[id(tensor)] = nn.Parameter(made, requires_grad=False) if is_parameter else made
    for _, part in parts:
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in empty:
                    table[name] = empty[id(tensor)]
    return {name: _weight(tensor) for name, tensor in held.items()}


def _weight(tensor: Tensor) -> Weight:
    return tensor.weight if isinstance(tensor, Recorded) else InMemory(tensor.detach())


def _files(folder: Path) -> list[Path]:
    """The safetensors files of the model, which must be whole; none where it is in torch's .bin files."""
    files = weights.model_files(folder)
    if any(path.suffix != ".safetensors" for path in files):
        return []
    weights.check_folder(folder)
    return files
