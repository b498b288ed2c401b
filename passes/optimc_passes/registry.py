"""Every pass a recipe can name. To add one: import it here and put it in the list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from optimc.errors import ConfigError, Fault, UnknownNameError
from optimc.recipe.fault_message import fault_message
from optimc.registry import Registry
from optimc_passes.base import Pass
from optimc_passes.fuse.merge_gate_up import MergeGateUp
from optimc_passes.fuse.merge_qkv import MergeQkv
from optimc_passes.quantize.rtn import Rtn

_PASSES: tuple[type[Pass[Any]], ...] = (
    Rtn,
    MergeQkv,
    MergeGateUp,
)


def _registered() -> Registry[type[Pass[Any]]]:
    registry: Registry[type[Pass[Any]]] = Registry("pass")
    for pass_type in _PASSES:
        registry.register(pass_type.name, pass_type)
    return registry


PASSES: Registry[type[Pass[Any]]] = _registered()
"""Pass name to class; the class says its version, stage and `config_type`."""


def make_pass(name: str, options: Mapping[str, Any] | None = None, *, where: str | None = None) -> Pass[Any]:
    """Return the pass `name` with options as they stand in a recipe.

    Raises ConfigError with one fault per bad option, and for an unknown name one that lists the known ones.
    `where` is the place in the recipe that faults start from, "passes[1]"; the pass's name if not given.
    """
    place = where or name
    try:
        pass_type = PASSES[name]
    except UnknownNameError as error:
        raise ConfigError("passes", [Fault(place, str(error))]) from error
    try:
        config = pass_type.config_type.model_validate(dict(options or {}))
    except ValidationError as error:
        fields = pass_type.config_type.model_fields
        faults = [
            Fault(".".join([place, *map(str, detail["loc"])]), fault_message(detail, fields))
            for detail in error.errors()
        ]
        raise ConfigError("passes", faults) from error
    return pass_type(config)
