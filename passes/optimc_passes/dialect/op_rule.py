"""The form in which the dialect's rules are written down: what operands, attributes and results of an operator are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

Facts = dict[str, Any]
"""A node's attributes, what its operands have given to letters so far, and `has_NAME` of each optional operand."""

Dim = int | str
"""A size, or a letter that must stand for the same size in all operands and results of the node."""

ANY = "..."
"""As the first of a shape's dims: any number of axes, the same for all operands and results of the node."""

Shape = Callable[[Facts], tuple[Dim, ...]]


@dataclass(frozen=True, slots=True)
class Operand:
    """What one input must be. `shape` is computed from the attributes and letters bound by the operands before it."""

    name: str
    dtypes: frozenset[ir.DataType]
    shape: Shape
    optional: bool = False
    same_dtype_as: int | None = None
    """Index of an operand with which the dtype is shared."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one output must be declared as, if it is declared. `shape` is computed from what all operands have bound."""

    name: str
    dtypes: frozenset[ir.DataType]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute, the type it has and the values it may take."""

    name: str
    type: ir.AttributeType
    allowed: Callable[[Any], bool]
    wanted: str
    default: int | float | None = None
    """What it is where it is absent; None if it must be present."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """One operator, or one form of it."""

    operands: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[Output, ...] | None
    """None for any number of anything."""
    relations: tuple[tuple[Callable[[Facts], bool], str], ...] = ()
    """Conditions on facts, each with the sentence that reports its failure."""
    applies: Callable[[ir.Node], bool] = lambda _node: True
    more_facts: Callable[[ir.Node], Facts] = lambda _node: {}
    """What else the relations are about."""
