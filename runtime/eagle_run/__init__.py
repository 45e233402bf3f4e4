"""eagle-run: a lean runtime that decodes with an EAGLE bundle, losslessly at every temperature."""

__version__ = "0.1.0"
