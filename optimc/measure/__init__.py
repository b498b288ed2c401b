"""Measurement: benchmark, evaluation against the original model, comparison of recipes."""
