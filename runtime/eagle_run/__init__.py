"""eagle-run: a lean runtime that decodes with an EAGLE bundle, losslessly at every temperature."""

from eagle_run.telemetry import disable_telemetry

__version__ = "0.1.0"

disable_telemetry()
