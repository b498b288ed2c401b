"""What a search may choose from: overrides of a recipe, switches of the engine, and the figure it is about."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from optimc.errors import ConfigError, Fault
from optimc.measure.store import EngineSwitches
from optimc.recipe import Recipe
from optimc.recipe.yaml_lines import parse_yaml

Value = bool | int | float | str
Parameters = Mapping[str, Value]
"""From a choice to the value taken."""
Objective = Literal["tpot_p50_ms", "ttft_p50_ms", "tokens_per_s", "knee", "cost"]

MAXIMISED = ("tokens_per_s", "knee")
SERVE = "serve."
"""What begins so is a switch of the engine; everything else is a path of the recipe, as `--set` takes it."""
SWITCHES = tuple(field.name for field in fields(EngineSwitches) if field.name != "threads")


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination of the choices' values is a point."""

    choices: Mapping[str, tuple[Value, ...]]
    objective: Objective = "tpot_p50_ms"

    @classmethod
    def read(cls, path: Path) -> Space:
        """Read it from YAML. Raises ConfigError with all faults at once."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), [Fault("", str(error))]) from error
        return cls.load(parse_yaml(text, str(path)).data, str(path))

    @classmethod
    def load(cls, data: Any, source: str) -> Space:
        """Check parsed YAML. Raises ConfigError with all faults at once."""
        if not isinstance(data, dict):
            raise ConfigError(source, [Fault("", "a search space is a mapping with the key 'choices'")])
        known = ("choices", "objective")
        faults = [Fault(str(key), f"unknown key; known: {', '.join(known)}") for key in data if key not in known]
        choices = data.get("choices")
        if not isinstance(choices, dict) or not choices:
            faults.append(Fault("choices", "must map at least one path to a list of values"))
            choices = {}
        for path, values in choices.items():
            faults += _choice_faults(str(path), values)
        objective = data.get("objective", "tpot_p50_ms")
        if objective not in get_args(Objective):
            faults.append(Fault("objective", f"must be one of {', '.join(get_args(Objective))}, got {objective!r}"))
        if faults:
            raise ConfigError(source, faults)
        return cls({str(path): tuple(values) for path, values in choices.items()}, objective)

    @classmethod
    def of_recipe(cls, recipe: Recipe, objective: Objective = "tpot_p50_ms") -> Space:
        """Return the usual choices for what a recipe has. Raises ConfigError if it has nothing to choose."""
        choices: dict[str, tuple[Value, ...]] = {}
        names = [spec.name for spec in recipe.passes]
        for index, spec in enumerate(recipe.passes):
            where = f"passes.{spec.name if names.count(spec.name) == 1 else index}"
            if spec.name in ("rtn", "gptq", "awq") and spec.options.get("bits") != "auto":
                choices[f"{where}.bits"] = (4, 8)
                choices[f"{where}.group_size"] = (32, 64, 128)
            if spec.name == "kv_quant" and spec.options.get("dtype") != "auto":
                choices[f"{where}.dtype"] = ("int8", "int4")
            if spec.name == "medusa" and spec.options.get("from") is None:
                choices[f"{where}.heads"] = (2, 3, 5)
        if recipe.target.backend == "cpu" and "kv_quant" not in names:
            choices["target.kv_dtype"] = ("float32", "bfloat16", "int8")
        if not choices:
            raise ConfigError(recipe.name, [Fault("", "has nothing to choose from by itself; give --space FILE")])
        return cls(choices, objective)

    @property
    def maximised(self) -> bool:
        """Whether more of the objective is better."""
        return self.objective in MAXIMISED

    @property
    def size(self) -> int:
        """Number of points."""
        count = 1
        for values in self.choices.values():
            count *= len(values)
        return count

    @property
    def digest(self) -> str:
        """Equal for spaces that mean the same."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def points(self) -> Iterator[dict[str, Value]]:
        """Yield all points, the last choice changing fastest."""
        for values in itertools.product(*self.choices.values()):
            yield dict(zip(self.choices, values, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"choices": {path: list(values) for path, values in self.choices.items()}, "objective": self.objective}


def overrides_of(parameters: Parameters) -> tuple[str, ...]:
    """Return what a point changes in the recipe. JSON is YAML, so text stays text."""
    return tuple(f"{path}={json.dumps(value)}" for path, value in parameters.items() if not path.startswith(SERVE))


def switches_of(parameters: Parameters, base: EngineSwitches) -> EngineSwitches:
    """Return the switches of a point."""
    chosen = {path.removeprefix(SERVE): value for path, value in parameters.items() if path.startswith(SERVE)}
    return replace(base, **chosen)  # type: ignore[arg-type]  # checked with the space


def point_key(parameters: Parameters) -> str:
    """Return the same text for the same point."""
    return json.dumps(dict(parameters), sort_keys=True)


def _choice_faults(path: str, values: object) -> list[Fault]:
    where = f"choices.{path}"
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        return [Fault(where, f"must be a list of values, got {values!r}")]
    faults = [
        Fault(where, f"values are numbers, words, true or false, got {value!r}")
        for value in values
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value))
    ]
    # By equality, as the sampler tells values apart: what it learns of 4.0 it would count for 4.
    if not faults and len(set(values)) != len(values):
        faults.append(Fault(where, "a value is given twice; 4 and 4.0 are one, and so are 1 and true"))
    if path.startswith(SERVE):
        name = path.removeprefix(SERVE)
        if name not in SWITCHES:
            faults.append(Fault(where, f"no such switch of the engine; known: {', '.join(SWITCHES)}"))
        elif not faults:
            faults += _switch_faults(where, name, values)
    return faults


def _switch_faults(where: str, name: str, values: Sequence[Any]) -> list[Fault]:
    """Let the engine's own configuration say what it takes."""
    faults = []
    for value in values:
        try:
            replace(EngineSwitches(), **{name: value}).to_engine_config()
        except ConfigError as error:
            faults += [Fault(where, fault.message) for fault in error.faults]
        except (TypeError, AttributeError):
            faults.append(Fault(where, f"cannot be {value!r}"))
    return faults
