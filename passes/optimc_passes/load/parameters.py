"""Which parameters a model has, learned from the model itself, without memory for a single one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimc.errors import CheckpointError
from optimc.wording import one_line


@dataclass(frozen=True)
class ParameterTable:
    """Names and shapes of everything a checkpoint must provide (parameters and persistent buffers)."""

    shapes: Mapping[str, tuple[int, ...]]
    integers: frozenset[str]
    """Names that hold integers or booleans; all others are floating point."""
    ties: Mapping[str, str]
    """Parameter to the one it shares its values with, as the configuration has it: head to embedding."""
    base_prefix: str
    """The attribute the headless model lives in ("model"): checkpoints of that model lack it."""
    ignored_patterns: tuple[str, ...]
    """Regular expressions of checkpoint keys the model's authors declare unneeded."""


def list_parameters(config: Any, model_class: Any) -> ParameterTable:
    """Build the model of `config` on the meta device and list what it needs. `config` is not changed.

    Raises CheckpointError if the configuration contradicts itself, so that no model can be built from it.
    """
    import torch

    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # constructors fail in every way when, say, sizes do not divide
        raise CheckpointError(
            f"no {model_class.__name__} can be built from its configuration: {one_line(error)}"
        ) from error
    state = model.state_dict()
    return ParameterTable(
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        integers=frozenset(name for name, tensor in state.items() if not tensor.is_floating_point()),
        ties=dict(model.all_tied_weights_keys),
        base_prefix=model.base_model_prefix,
        ignored_patterns=tuple(model._keys_to_ignore_on_load_unexpected or ()),
    )
