"""A recipe that is built in variants: what it says, and whether a changed one would be taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimc.errors import ConfigError
from optimc.measure.finding import faults_in_line
from optimc.recipe import Recipe
from optimc.recipe.overrides import apply_overrides
from optimc.recipe.yaml_lines import parse_yaml

if TYPE_CHECKING:
    from optimc.build import BuildOptions

Check = Callable[[tuple[str, ...]], Recipe]
"""From further overrides to the checked recipe. Raises ConfigError with the validator's own words."""


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A checked recipe. Variants are made by overrides, not by files of their own: so what the recipe names beside
    itself (its model, its text, a user's passes) is found as ever."""

    recipe: Recipe
    entries: tuple[Any, ...]
    """`passes` as written, after the user's overrides."""
    check: Check

    @classmethod
    def read(cls, path: Path, options: BuildOptions) -> RecipeFile:
        """Read it through the loader that builds use. Raises ConfigError."""
        from optimc.build import read_inputs

        def check(overrides: tuple[str, ...]) -> Recipe:
            changed = replace(options, output=None, overrides=(*options.overrides, *overrides))
            return read_inputs(path, changed).recipe

        recipe = check(())
        data, _ = apply_overrides(parse_yaml(path.read_text("utf-8"), str(path)).data, options.overrides)
        return cls(recipe, tuple(data.get("passes") or ()), check)

    def refusal(self, overrides: Sequence[str]) -> str | None:
        """Return why a changed recipe would not be taken, in the loader's words; None if it would."""
        try:
            self.check(tuple(overrides))
        except ConfigError as error:
            return faults_in_line(error)
        return None
