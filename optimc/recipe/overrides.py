"""`--set passes.rtn.bits=8`: changing a recipe from the command line, before it is checked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from optimc.errors import ConfigError, Fault
from optimc.recipe.yaml_lines import parse_yaml


def apply_overrides(data: Any, overrides: Sequence[str]) -> tuple[Any, list[Fault]]:
    """Return a copy of parsed recipe `data` with each `path=value` put in, and the faults of those that do not fit.

    A path is dotted keys. Below `passes`, a part is a pass's name (which must occur once) or its position from 0.
    Values are YAML.
    """
    data = copy.deepcopy(data)
    faults: list[Fault] = []
    for override in overrides:
        path, separator, text = override.partition("=")
        parts = path.strip().split(".")
        try:
            if not separator or not all(parts):
                raise _MisfitError("write it as path=value, for example passes.rtn.bits=8")
            if not isinstance(data, dict):
                raise _MisfitError("the recipe is not a mapping")
            _put(data, parts, parse_yaml(text, "--set").data if text.strip() else "")
        except (_MisfitError, ConfigError) as error:
            message = error.faults[0].message if isinstance(error, ConfigError) else str(error)
            faults.append(Fault(f"--set {override}", message))
    return data, faults


class _MisfitError(Exception):
    """An override that cannot be applied."""


def _put(data: dict[str, Any], parts: list[str], value: Any) -> None:
    if parts[0] == "passes" and len(parts) > 1:
        _put_in_mapping(_pass_options(data, parts[1], parts), parts[2:], value)
        return
    if parts[0] == "model" and len(parts) > 1 and isinstance(data.get("model"), str):
        data["model"] = {"source": data["model"]}
    _put_in_mapping(data, parts, value)


def _put_in_mapping(target: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise _MisfitError(f"'{part}' is not a mapping")
    target[parts[-1]] = value


def _pass_options(data: dict[str, Any], which: str, parts: list[str]) -> dict[str, Any]:
    """Return the options mapping of one entry of `passes`, making it one if it was a bare name."""
    entries = data.get("passes")
    if not isinstance(entries, list):
        raise _MisfitError("the recipe has no list of passes")
    names = [entry if isinstance(entry, str) else next(iter(entry), "") for entry in entries if entry]
    if which.isascii() and which.isdigit() and int(which) < len(names):
        index = int(which)
    elif names.count(which) == 1:
        index = names.index(which)
    elif which in names:
        raise _MisfitError(
            f"pass '{which}' occurs {names.count(which)} times; name it by position, 0 to {len(names) - 1}"
        )
    else:
        raise _MisfitError(f"no pass '{which}' in the recipe; it has: {', '.join(names) or 'none'}")
    if len(parts) < 3:
        raise _MisfitError(f"name the option too, for example passes.{which}.bits=8")
    entry = entries[index]
    if isinstance(entry, str) or entry[names[index]] is None:
        entry = entries[index] = {names[index]: {}}
    options = entry[names[index]]
    if not isinstance(options, dict):
        raise _MisfitError(f"the options of '{which}' are not a mapping")
    return options
