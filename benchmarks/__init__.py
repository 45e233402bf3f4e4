"""Measurements of both packages, and of others beside them. Each is `python -m benchmarks.NAME`."""

from eagle_run.telemetry import disable_telemetry

disable_telemetry()
