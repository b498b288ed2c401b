"""Loading a recipe: every fault is found before any is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from optimc.errors import ConfigError, Fault
from optimc.recipe.fault_message import fault_message
from optimc.recipe.model import PassConfigs, Recipe
from optimc.recipe.overrides import apply_overrides
from optimc.recipe.yaml_lines import LinedYaml, YamlPath, format_path, parse_yaml
from optimc.wording import raised, source_file

MAX_RECIPE_BYTES = 1 << 20

Finding = tuple[YamlPath, str]
"""Where in the YAML something is wrong, and what."""


def load_recipe(
    path: Path,
    *,
    pass_configs: PassConfigs,
    overrides: Sequence[str] = (),
    check: Callable[[Mapping[str, Any]], Iterable[Finding]] = lambda _data: (),
) -> Recipe:
    """Read, override and check a recipe. `check` sees the parsed YAML and finds what only the caller can know.

    Raises ConfigError with all faults at once: what is wrong with the YAML's structure, with the overrides, with
    each field, with each pass's name and options.
    """
    source = str(path)
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise ConfigError(source, [Fault("", f"larger than {MAX_RECIPE_BYTES} bytes; this is not a recipe")])
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(source, [Fault("", error.strerror or str(error))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(source, [Fault("", "not a UTF-8 text file")]) from error
    parsed = parse_yaml(text, source)
    data, faults = apply_overrides(parsed.data, overrides)
    faults = [*parsed.duplicates, *faults]
    if not isinstance(data, dict):
        raise ConfigError(source, [*faults, Fault("", "a recipe is a mapping of keys to values", 1)])
    faults += [Fault(format_path(where), message, parsed.line_of(where)) for where, message in check(data)]
    normal, pass_faults = _normalise_passes(data.get("passes"), parsed, pass_configs)
    faults += pass_faults
    recipe = _validate(data | ({"passes": normal} if "passes" in data else {}), parsed, faults)
    if faults or recipe is None:
        raise ConfigError(source, sorted(faults, key=lambda fault: fault.line or 0))
    return recipe


def _validate(data: dict[str, Any], parsed: LinedYaml, faults: list[Fault]) -> Recipe | None:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        faults += [_fault(detail, (), parsed, Recipe.model_fields) for detail in error.errors()]
        return None


def _normalise_passes(
    entries: object, parsed: LinedYaml, configs: PassConfigs
) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Turn `- rtn: {bits: 4}` into name and checked options; defaults are written out, so that they are hashed."""
    if entries is None:
        return [], []
    if not isinstance(entries, list):
        return [], [Fault("passes", "must be a list", parsed.line_of(("passes",)))]
    normal: list[dict[str, Any]] = []
    faults: list[Fault] = []
    for index, entry in enumerate(entries):
        where: YamlPath = ("passes", index)
        if isinstance(entry, str):
            entry = {entry: None}
        if not isinstance(entry, dict) or len(entry) != 1:
            message = "write a pass as `- name` or `- name: {option: value}`"
            faults.append(Fault(format_path(where), message, parsed.line_of(where)))
            continue
        name, options = next(iter(entry.items()))
        options = {} if options is None else options
        where = (*where, str(name))
        config, messages = _config_of(name, configs)
        if config is not None and not isinstance(options, dict):
            messages = ["options must be a mapping"]
        faults += [Fault(format_path(where), message, parsed.line_of(where)) for message in messages]
        if config is None or messages:
            continue
        try:
            checked = config.model_validate(options)
            normal.append({"name": name, "options": checked.model_dump(mode="json")})
        except ValidationError as error:
            keys = [field.alias or name for name, field in config.model_fields.items()]
            faults += [_fault(detail, where, parsed, keys) for detail in error.errors()]
        except Exception as error:
            if ":" not in name:
                raise
            # A user's pass brings its own validators and types.
            message = f"its options cannot be read: {raised(error, source_file(config))}"
            faults.append(Fault(format_path(where), message, parsed.line_of(where)))
    return normal, faults


def _config_of(name: object, configs: PassConfigs) -> tuple[type[BaseModel] | None, list[str]]:
    """Return the configuration of a pass, or what is wrong with its name."""
    try:
        return configs[name], []  # type: ignore[index]
    except KeyError:
        return None, [f"unknown pass; known: {', '.join(sorted(configs))}"]
    except ConfigError as error:
        return None, [fault.message for fault in error.faults]


def _fault(detail: Any, prefix: YamlPath, parsed: LinedYaml, fields: Any) -> Fault:
    path: YamlPath = (*prefix, *(part for part in detail["loc"] if isinstance(part, (str, int))))
    if detail["type"] == "invalid_key":
        path = (*path[:-1], str(path[-1]))  # a key, not a position
    return Fault(format_path(path), fault_message(detail, fields), parsed.line_of(path))
