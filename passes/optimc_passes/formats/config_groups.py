"""`config_groups` of a compressed-tensors description: which layers are stored how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.formats.scheme import PATTERN_PREFIX, boolean, group_size, integer, is_pattern, names

PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
_NAIVE = "naive-quantized"
BITS = (2, 3, 4, 8)
"""Widths of integers that are read and written."""


@dataclass(frozen=True)
class ConfigGroup:
    """One entry of `config_groups`: the layers it is about and how their weights are stored."""

    name: str
    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group: int
    """Columns per group; -1 for one scale per row or per tensor."""
    block: tuple[int, int] | None
    static_activations: bool
    """Whether the layer's input has a scale of its own in the checkpoint."""
    token_activations: bool
    """Whether the layer was made for 8-bit activations with a scale per token."""


def read_groups(facts: Mapping[str, Any], where: str) -> tuple[ConfigGroup, ...]:
    """Return the groups of a description. Raises CheckpointError and UnsupportedModelError naming the group."""
    groups = facts.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups says nothing about any layer")
    overall = facts.get("format")
    return tuple(_read_group(name, group, overall, where) for name, group in groups.items())


def group_of(groups: Sequence[ConfigGroup], layer: str) -> ConfigGroup | None:
    """Return the group that a layer belongs to: by its name first, then by pattern, then by class."""
    for kind in (_is_name, is_pattern, _is_class):
        for group in groups:
            if any(kind(target) and _matches(target, layer) for target in group.targets):
                return group
    return None


def is_named(targets: Sequence[str], layer: str) -> bool:
    """Whether one of the targets means the layer, be it by name, pattern or class."""
    return any(_matches(target, layer) for target in targets)


def _read_group(name: str, facts: Any, overall: Any, where: str) -> ConfigGroup:
    place = f"{where}: config_groups.{name}"
    if not isinstance(facts, dict) or not isinstance(facts.get("weights"), dict):
        raise CheckpointError(f"{place}: has no description of weights")
    weights = facts["weights"]
    targets = names(facts, "targets", place)
    if not targets:
        raise CheckpointError(f"{place}: targets names no layer")
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise UnsupportedModelError(f"{place}: weights of type {kind!r} are not read; readable are int and float")
    is_float = kind == "float"
    stored_as = _stored_as(facts.get("format") or overall, is_float=is_float, where=place)
    bits = integer(weights, "num_bits", place, default=8)
    if bits not in ((8,) if is_float else BITS):
        raise UnsupportedModelError(
            f"{place}: {kind} weights of {bits} bits; readable are int of 2, 3, 4, 8, float of 8"
        )
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    columns = -1
    if strategy == "group":
        columns = group_size(weights, "group_size", place)
    elif strategy not in ("channel", "tensor") and not (strategy == "block" and is_float):
        raise UnsupportedModelError(f"{place}: strategy '{strategy}' is not read")
    return ConfigGroup(
        name=name,
        targets=targets,
        format=stored_as,
        bits=bits,
        is_float=is_float,
        symmetric=boolean(weights, "symmetric", place, default=True),
        strategy=strategy,
        group=columns,
        block=_block(weights, place) if strategy == "block" else None,
        static_activations=_is_int8(facts.get("input_activations"), dynamic=False),
        token_activations=_is_int8(facts.get("input_activations"), dynamic=True),
    )


def _stored_as(format_: Any, *, is_float: bool, where: str) -> str:
    if format_ == _NAIVE:
        return FLOAT if is_float else INTEGER
    if format_ not in (PACKED, INTEGER, FLOAT) or (format_ == FLOAT) != is_float:
        kind = "float" if is_float else "int"
        raise UnsupportedModelError(
            f"{where}: format '{format_}' of {kind} weights is not read; readable are {PACKED}, {INTEGER} and {FLOAT}"
        )
    return str(format_)


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    value = weights.get("block_structure")
    if (
        not isinstance(value, Sequence)
        or len(value) != 2
        or not all(isinstance(size, int) and size > 0 for size in value)
    ):
        raise CheckpointError(f"{where}: block_structure must be two sizes, got {value!r}")
    return value[0], value[1]


def _is_int8(activations: Any, *, dynamic: bool) -> bool:
    """Whether activations are rounded to 8-bit integers, with scales of the moment or with one of the checkpoint's."""
    if not isinstance(activations, dict) or activations.get("type", "int") != "int":
        return False
    if activations.get("num_bits", 8) != 8:
        return False
    return bool(activations.get("dynamic")) is dynamic


def _matches(target: str, layer: str) -> bool:
    if is_pattern(target):
        return re.match(target.removeprefix(PATTERN_PREFIX), layer) is not None
    return target == layer or _is_class(target)


def _is_class(target: str) -> bool:
    return target == "Linear"


def _is_name(target: str) -> bool:
    return not is_pattern(target) and not _is_class(target)
