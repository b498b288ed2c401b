"""The recipe with factors switched off: other plans, other switches of the engine, or both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from optimc.measure.attribution.factors import Factor, FactorKind, without_passes
from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.measure.store import EngineSwitches
from optimc.recipe import Recipe

_LONGEST_NAME = 100
"""Characters of a recipe's name."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One recipe and one way to run it."""

    name: str
    """The plan's; variants that differ only in switches share a plan."""
    removed: frozenset[str]
    """Names of the factors that are switched off."""
    overrides: tuple[str, ...]
    """What changes the recipe, beside what the user changed; () is the recipe itself."""
    recipe: Recipe | None
    """Checked; None if the loader refuses it."""
    switches: EngineSwitches
    refusal: str | None = None
    """Why there can be no such plan."""


@dataclass(frozen=True, slots=True)
class Step:
    """One comparison: with a factor and without it, everything else equal."""

    factor: str
    kind: FactorKind
    with_: Variant
    without: Variant
    note: str = ""


def leave_one_out(file: RecipeFile, factors: Sequence[Factor], switches: EngineSwitches) -> tuple[Step, ...]:
    """Return the whole recipe against the recipe without each factor that can be measured."""
    whole = variant(file, (), switches)
    usable = [factor for factor in factors if factor.na is None]
    return tuple(Step(f.name, f.kind, whole, variant(file, (f,), switches)) for f in usable)


def everything(file: RecipeFile, factors: Sequence[Factor], switches: EngineSwitches) -> Step:
    """Return the whole recipe against the bare one, with every factor switched off that can be."""
    usable = [factor for factor in factors if factor.na is None]
    return Step("all", "all", variant(file, (), switches), variant(file, usable, switches))


def cumulative(file: RecipeFile, factors: Sequence[Factor], switches: EngineSwitches) -> tuple[Step, ...]:
    """Return each factor on top of those before it, from the bare recipe up to the whole one.

    A level that the loader refuses is skipped; the next step's note names what it then holds as well.
    """
    usable = [factor for factor in factors if factor.na is None]
    steps: list[Step] = []
    below = variant(file, usable, switches)
    also: list[str] = []
    for count, factor in enumerate(usable, 1):
        level = variant(file, usable[count:], switches)
        if level.refusal is not None:
            steps.append(Step(factor.name, factor.kind, level, below))
            also.append(factor.name)
            continue
        note = f"together with {', '.join(also)}" if also else ""
        steps.append(Step(factor.name, factor.kind, level, below, note))
        below, also = level, []
    return tuple(steps)


def variant(file: RecipeFile, removed: Sequence[Factor], switches: EngineSwitches) -> Variant:
    """Return the recipe without these factors, checked by the loader that builds use."""
    changing = [factor for factor in removed if factor.changes_plan]
    for factor in removed:
        for switch in factor.switches:
            switches = switches.turned_off(switch)
    names = frozenset(factor.name for factor in removed)
    if not changing:
        return Variant(file.recipe.name, names, (), file.recipe, switches)
    passes = [index for factor in changing for index in factor.passes]
    name = _name(file.recipe.name, [factor.name for factor in changing])
    overrides = (
        f"name={name}",
        *([without_passes(file, passes)] if passes else []),
        *(override for factor in changing for override in factor.target),
    )
    refusal = file.refusal(overrides)
    recipe = None if refusal is not None else file.check(overrides)
    return Variant(name, names, overrides, recipe, switches, refusal)


def _name(recipe: str, removed: Sequence[str]) -> str:
    """Return a name that is a recipe's and a file's, the same for the same factors, however many they are."""
    words = [re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") for name in removed]
    name = f"{recipe}--without-{'-'.join(words)}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256("\n".join(removed).encode()).hexdigest()[:12]
    return f"{recipe[: _LONGEST_NAME - 24]}--without-{digest}"
