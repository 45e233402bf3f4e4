"""Weights on disk: finding, identifying and reading them, pre-quantised ones included."""
