"""Checkpoint formats of other tools: quantized weights read from them and written to them."""
