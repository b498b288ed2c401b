"""Recipes: YAML to a checked, frozen description of a build."""

from optimc.recipe.load import load_recipe
from optimc.recipe.model import (
    CalibrationSpec,
    LimitsSpec,
    ModelSpec,
    PassSpec,
    QualitySpec,
    Recipe,
    ReportSpec,
    TargetSpec,
)
from optimc.recipe.schema import recipe_schema

__all__ = [
    "CalibrationSpec",
    "LimitsSpec",
    "ModelSpec",
    "PassSpec",
    "QualitySpec",
    "Recipe",
    "ReportSpec",
    "TargetSpec",
    "load_recipe",
    "recipe_schema",
]
