"""What a class must be to run as a pass. Ours are held to it by a test, a user's when a recipe names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from optimc_passes.base import Pass, PassConfig

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


def contract_faults(candidate: Any) -> list[str]:
    """Return everything that keeps `candidate` from being a pass, one sentence each."""
    if not isinstance(candidate, type) or not issubclass(candidate, Pass):
        return ["is no subclass of optimc_passes.base.Pass"]
    return [*_missing_methods(candidate), *_wrong_attributes(candidate), *_undescribed(candidate)]


def _missing_methods(candidate: type[Pass[Any]]) -> Iterator[str]:
    for method in sorted(candidate.__abstractmethods__):
        yield f"does not fill in {method}"
    # A fusion is complete but for its rules.
    if inspect.isabstract(candidate) or not hasattr(candidate, "rules"):
        return
    rules = candidate.rules
    if not isinstance(rules, tuple) or not rules or not all(_is_rule(rule) for rule in rules):
        yield f"rules is {rules!r}, want a tuple of at least one subclass of Rule"
        return
    for rule in rules:
        for method in sorted(getattr(rule, "__abstractmethods__", ())):
            yield f"rule {rule.__name__} does not fill in {method}"


def _is_rule(candidate: object) -> bool:
    from optimc_passes.fuse.rule import Rule  # which imports what this file describes

    return isinstance(candidate, type) and issubclass(candidate, Rule)


def _wrong_attributes(candidate: type[Pass[Any]]) -> Iterator[str]:
    name = getattr(candidate, "name", None)
    if not isinstance(name, str) or not _NAME.match(name):
        yield f"name is {name!r}, want lower-case letters, digits and underscores"
    version = getattr(candidate, "version", None)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        yield f"version is {version!r}, want a whole number from 1"
    stage = getattr(candidate, "stage", None)
    if stage not in ("weights", "graph", "heads"):
        yield f"stage is {stage!r}, want 'weights', 'graph' or 'heads'"
    config_type = getattr(candidate, "config_type", None)
    if not isinstance(config_type, type) or not issubclass(config_type, PassConfig):
        yield f"config_type is {config_type!r}, want a subclass of PassConfig"
        return
    for setting, want in (("frozen", True), ("extra", "forbid")):
        if config_type.model_config.get(setting) != want:
            has = config_type.model_config.get(setting)
            yield f"config_type {config_type.__name__} has {setting}={has!r}, want {want!r}"


def _undescribed(candidate: type[Pass[Any]]) -> Iterator[str]:
    if not candidate.__dict__.get("__doc__"):
        yield "has no docstring; it is what `optimc recipe-schema` and readers see"
    config_type = getattr(candidate, "config_type", None)
    if isinstance(config_type, type) and issubclass(config_type, PassConfig):
        for option, field in config_type.model_fields.items():
            if not field.description:
                yield f"option {option} is not described; put a docstring below it"
