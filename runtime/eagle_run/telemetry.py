"""Keeps libraries from collecting usage data: said before any of them is imported."""

from __future__ import annotations

import os
import sys

# ONNX Runtime 1.29 and newer writes a number for this machine and a database under HOME, and sends what it
# runs; huggingface_hub reports what it is used for.
_SWITCHES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")


def disable_telemetry() -> None:
    """Sets the switches of libraries that would, for this process and those it starts.

    A switch that the user has set stays as it is. Imports nothing.
    """
    wanted = "ORT_DISABLE_TELEMETRY" in os.environ
    for switch in _SWITCHES:
        os.environ.setdefault(switch, "1")
    loaded = sys.modules.get("onnxruntime")
    if loaded is not None and not wanted:  # it has read its switch already
        getattr(loaded, "disable_telemetry_events", lambda: None)()
