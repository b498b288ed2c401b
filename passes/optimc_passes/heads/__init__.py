"""Medusa heads: what they are, how they are trained, measured and imported."""
