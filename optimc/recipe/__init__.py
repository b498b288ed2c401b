"""Recipes: YAML to a checked, frozen description of a build."""
