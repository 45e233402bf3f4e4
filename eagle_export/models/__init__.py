"""Targets and heads as torch modules with explicit caches and masks, made for tracing."""
