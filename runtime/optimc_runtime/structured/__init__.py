"""Answers that keep to a grammar: what may follow, token by token, by llguidance."""
