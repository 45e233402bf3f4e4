"""Builders and stand-ins that tests share: bundles, heads, targets, engines, data."""
