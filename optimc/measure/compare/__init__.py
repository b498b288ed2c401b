"""Recipes and plans beside each other: built, measured, judged by their gates."""
