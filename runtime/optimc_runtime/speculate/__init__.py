"""Speculative decoding: what is guessed, by whom, and whether guessing pays."""
