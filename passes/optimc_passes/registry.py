"""Every pass a recipe can name. Those of weights and heads stand here; rewrites of the graph in `fuse/pipeline.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from optimc.errors import ConfigError, Fault, UnknownNameError
from optimc.recipe.fault_message import fault_message
from optimc.registry import Registry
from optimc_passes.base import ConfigT, Pass
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.heads.medusa import Medusa
from optimc_passes.quantize.auto_bits import AutoBits
from optimc_passes.quantize.awq import Awq
from optimc_passes.quantize.gptq import Gptq
from optimc_passes.quantize.kv_quant import KvQuant
from optimc_passes.quantize.rtn import Rtn
from optimc_passes.quantize.smoothquant import SmoothQuant

_PASSES: tuple[type[Pass[Any]], ...] = (
    Rtn,
    Gptq,
    Awq,
    SmoothQuant,
    AutoBits,
    KvQuant,
    *GRAPH_PASSES,
    Medusa,
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
    return pass_type(checked_config(pass_type.config_type, options or {}, place))


def checked_config(config_type: type[ConfigT], options: Mapping[str, Any], place: str) -> ConfigT:
    """Return options as they stand in a recipe, checked. Raises ConfigError with one fault per bad option."""
    try:
        return config_type.model_validate(dict(options))
    except ValidationError as error:
        keys = [field.alias or name for name, field in config_type.model_fields.items()]
        faults = [
            Fault(".".join([place, *map(str, detail["loc"])]), fault_message(detail, keys)) for detail in error.errors()
        ]
        raise ConfigError("passes", faults) from error
