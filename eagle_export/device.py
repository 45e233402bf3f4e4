"""Where torch runs, and whether it multiplies bfloat16 fast there."""

from __future__ import annotations

import torch

from eagle_run.errors import EagleError


def device_named(name: str) -> torch.device:
    """ "cpu", "cuda", or "auto" for the GPU where there is one. Raises EagleError where "cuda" is none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EagleError(
            'the device is "cuda", but torch sees no CUDA GPU', hint="leave it out", parameters=["device"]
        )
    return torch.device("cuda", torch.cuda.current_device())


def multiplies_bf16(device: torch.device) -> bool:
    """Whether matrix units do; a processor without them (AMX) is 2 to 4 times slower than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_amx_tile_supported())
