"""What of a recipe can be switched off alone: passes, the target's options, features of the runtime."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.recipe import PassSpec, Recipe

FactorKind = Literal["pass", "target", "runtime", "all"]
"""`all` stands for everything together."""

ROUNDING = ("rtn", "gptq", "awq", "smoothquant")
"""Passes that leave quantized weights, unless they say `rounding: later`."""
HEADS = "medusa"
RUNTIME = ("inflight_batching", "chunked_prefill", "prefix_cache")
"""Switches of every engine, in the order in which they are added up."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that is switched off to see what it does."""

    name: str
    kind: FactorKind
    off: str
    """How it is switched off, in words."""
    passes: tuple[int, ...] = ()
    """Positions in the recipe's `passes` that are removed."""
    target: tuple[str, ...] = ()
    """Overrides of the recipe's target."""
    switches: tuple[str, ...] = ()
    """Switches of the engine that are turned off."""
    na: str | None = None
    """Why it cannot be switched off alone."""

    @property
    def changes_plan(self) -> bool:
        """Whether another plan is built."""
        return bool(self.passes or self.target)


def factors_of(file: RecipeFile, speculation: str = "off") -> tuple[Factor, ...]:
    """Return all factors, in the order in which the recipe adds them up: passes, target, runtime.

    `speculation` is how the engine guesses ahead, as `--speculation` takes it.
    """
    recipe = file.recipe
    found = [*_pass_factors(file), *_target_factors(file)]
    runtime = [Factor(name, "runtime", f"{name.replace('_', ' ')} off", switches=(name,)) for name in RUNTIME]
    if speculation == HEADS:
        # Without its heads the plan has nothing to speculate with: one cannot go without the other.
        found = [_with_speculation(factor) if _has_heads(factor, recipe) else factor for factor in found]
    elif speculation != "off":
        runtime.append(Factor("speculation", "runtime", "speculation off", switches=("speculation",)))
    return (*found, *runtime)


def heads_speculation(recipe: Recipe) -> str:
    """Return how an engine of this recipe guesses ahead when nobody says: by its heads, if it has any."""
    return HEADS if any(spec.name == HEADS for spec in recipe.passes) else "off"


def without_passes(file: RecipeFile, removed: Sequence[int]) -> str:
    """Return the override that leaves these entries out. JSON is YAML, so the recipe's loader reads it."""
    kept = [entry for index, entry in enumerate(file.entries) if index not in removed]
    return f"passes={json.dumps(kept)}"


def _pass_factors(file: RecipeFile) -> list[Factor]:
    groups: list[tuple[int, ...]] = [(index,) for index in range(len(file.entries))]
    for left, right in _inseparable(file.recipe.passes):
        one = next(group for group in groups if left in group)
        other = next(group for group in groups if right in group)
        if one != other:
            groups = [tuple(sorted({*one, *other})) if group == one else group for group in groups if group != other]
    refusals = {group: file.refusal([without_passes(file, group)]) for group in groups}
    found: dict[tuple[int, ...], str | None] = {}
    taken: set[tuple[int, ...]] = set()
    for group in sorted(groups):
        if group in taken:
            continue
        reason = refusals[group]
        if reason is None:
            found[group] = None
            continue
        partner = next((o for o in groups if o != group and o not in taken and _go_together(file, group, o)), None)
        if partner is None:
            found[group] = f"cannot be removed: {reason}"
            continue
        found.pop(partner, None)
        taken.add(partner)
        found[tuple(sorted((*group, *partner)))] = None
    return [_pass_factor(file.recipe.passes, group, na) for group, na in sorted(found.items())]


def _go_together(file: RecipeFile, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return file.refusal([without_passes(file, (*one, *other))]) is None


def _inseparable(passes: Sequence[PassSpec]) -> list[tuple[int, int]]:
    """Return pairs of which one means nothing without the other, where the recipe's loader would not notice: the build
    refuses `bits: auto` without an auto_bits before it, and `rounding: later` without a rounding behind rounds nothing.
    """
    pairs = []
    for index, spec in enumerate(passes):
        if spec.options.get("rounding") == "later":
            behind = range(index + 1, len(passes))
            pairs += [(index, other) for other in behind if _rounds(passes[other])][:1]
        if spec.options.get("bits") == "auto":
            pairs += [(other, index) for other in range(index) if passes[other].name == "auto_bits"][-1:]
    return pairs


def _rounds(spec: PassSpec) -> bool:
    return spec.name in ROUNDING and spec.options.get("rounding") != "later"


def _pass_factor(passes: Sequence[PassSpec], group: tuple[int, ...], na: str | None) -> Factor:
    names = [passes[index].name for index in group]
    if len(group) == 1:
        return Factor(f"{names[0]}[{group[0]}]", "pass", "removed", passes=group, na=na)
    return Factor("+".join(names), "pass", "removed together: one needs the other", passes=group, na=na)


def _target_factors(file: RecipeFile) -> list[Factor]:
    target, found = file.recipe.target, []
    plain = "float32" if target.backend != "tensorrt" else target.precision or "float16"
    if target.kv_dtype not in (None, plain):
        found.append(Factor("kv_dtype", "target", plain, target=(f"target.kv_dtype={plain}",)))
    quantizes = any(_rounds(spec) for spec in file.recipe.passes)
    if target.backend == "cpu" and quantizes and target.int8_activations is not False:
        off = ("target.int8_activations=false",)
        found.append(Factor("int8_activations", "target", "activations in float32", target=off))
    return [_checked(file, factor) for factor in found]


def _checked(file: RecipeFile, factor: Factor) -> Factor:
    reason = file.refusal(factor.target)
    return factor if reason is None else replace(factor, na=f"cannot be switched off: {reason}")


def _has_heads(factor: Factor, recipe: Recipe) -> bool:
    return any(recipe.passes[index].name == HEADS for index in factor.passes)


def _with_speculation(factor: Factor) -> Factor:
    off = f"{factor.off}, and speculation off"
    return replace(factor, name=f"{factor.name}+speculation", off=off, switches=("speculation",))
