"""What a recipe refers to and only the build knows: targets, passes' stages, the model's place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from optimc.build.activation_references import activation_findings
from optimc.build.heads_references import heads_findings
from optimc.build.kv_references import kv_findings
from optimc.build.lowering_options import SECTIONS, lowering_options
from optimc.errors import ConfigError
from optimc.local_path import local_path
from optimc.recipe import LimitsSpec, TargetSpec
from optimc.recipe.load import Finding

if TYPE_CHECKING:
    from optimc.build.pass_catalog import PassCatalog
    from optimc_passes.base import Pass
    from optimc_passes.emit import LoweringOptions, Target


def check_references(data: Mapping[str, Any], recipe_path: Path, catalog: PassCatalog) -> Iterator[Finding]:
    """Yield what is wrong with the references of a parsed recipe. Parts of a wrong shape are others' to report."""
    from optimc_passes.emit import TARGETS
    from optimc_passes.pipeline import check_order

    target = data.get("target", {})
    backend = target.get("backend", TargetSpec().backend) if isinstance(target, dict) else None
    if isinstance(backend, str) and backend in TARGETS:
        options = _options(target, data.get("limits"))
        yield from _refused_options(TARGETS[backend], options)
        yield from kv_findings(data, TARGETS[backend], options)
        yield from activation_findings(data)
        yield from heads_findings(data)
    elif isinstance(backend, str):
        yield ("target", "backend"), f"unknown target '{backend}'; known: {', '.join(sorted(TARGETS))}"

    model = data.get("model")
    source = model.get("source") if isinstance(model, dict) else model
    if isinstance(source, str) and source and find_model(source, recipe_path) is None:
        message = f"'{source}' is neither a folder nor a .gguf file nor a hub id (organisation/name)"
        yield ("model",), message

    entries = data.get("passes")
    listed = entries if isinstance(entries, list) else []
    names = [next(iter(entry), None) if isinstance(entry, dict) else entry for entry in listed]
    known = [(index, type_) for index, name in enumerate(names) for type_ in _pass_types(name, catalog)]
    misplaced: set[int] = set()
    for place, message in check_order([type_ for _, type_ in known]):
        index = known[place][0]
        if index not in misplaced:  # an entry may stand for many passes
            misplaced.add(index)
            yield ("passes", index), message
    if data.get("calibration") is None:
        for index, type_ in known:
            # Of passes that decide by their options it is a property; those are looked at with their options.
            uses: object = type_.uses_calibration
            if uses is True:
                yield ("passes", index), f"{type_.name} needs calibration text; add a calibration section to the recipe"
    yield from _shared_names(known)


def _pass_types(name: object, catalog: PassCatalog) -> tuple[type[Pass[Any]], ...]:
    """Return what a name stands for; nothing if it stands for nothing, which `load_recipe` reports."""
    try:
        return catalog.types(name) if isinstance(name, str) else ()
    except (KeyError, ConfigError):
        return ()


def _shared_names(known: Sequence[tuple[int, type[Pass[Any]]]]) -> Iterator[Finding]:
    """Yield users' passes that go by the name of another one: reports and errors could not tell them apart."""
    first: dict[str, tuple[int, type[Pass[Any]]]] = {}
    for index, type_ in known:
        earlier, other = first.setdefault(type_.name, (index, type_))
        if type_.source_digest != other.source_digest:
            message = f"{type_.__name__} is named '{type_.name}' as passes[{earlier}] is, {other.__name__}; rename one"
            yield ("passes", index), message


def _options(target: Mapping[str, Any], limits: object) -> LoweringOptions:
    """Return what is asked of the target. Sections of a wrong shape count as the defaults here."""
    try:
        asked = TargetSpec.model_validate(target)
    except ValidationError:
        asked = TargetSpec()
    try:
        checked = LimitsSpec.model_validate(limits or {})
    except ValidationError:
        checked = LimitsSpec()
    return lowering_options(asked, checked)


def _refused_options(target: Target, options: LoweringOptions) -> Iterator[Finding]:
    """Yield the options a target refuses, each at its place."""
    for option, reason in target.check_options(options).items():
        yield (SECTIONS[option], option), reason


def find_model(source: str, recipe_path: Path) -> str | None:
    """Return the model's local path, or the hub id as it is; None if it can be neither.

    A relative path is looked up from the working directory first, then from the recipe's folder.
    """
    found = local_path(source, recipe_path.parent)
    if found is not None:
        return str(found)
    is_hub_id = source.count("/") == 1 and not source.endswith(".gguf") and not source.startswith((".", "~", "/"))
    return source if is_hub_id else None
