"""eagle-export: a language model and its EAGLE head to plain ONNX graphs and compiled engines."""

from eagle_run.telemetry import disable_telemetry

disable_telemetry()
