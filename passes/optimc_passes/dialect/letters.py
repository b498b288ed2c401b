"""What the letters of an operator's rule stand for at one node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from optimc_passes.dialect.op_rule import ANY, Facts, Shape

Dims = Sequence[int | str | None]
"""Sizes, symbols, and None for what is not known."""


def dims_of(shape: ir.Shape) -> Dims:
    """Return a shape as plain values."""
    return [dim if isinstance(dim, int) else dim.value for dim in shape]


def resolve(shape: Shape, facts: Facts) -> Dims | None:
    """Return what a shape of a rule is, as far as its letters stand for something; None if its rank is not known."""
    letters = list(shape(facts))
    leading: Dims = ()
    if letters[:1] == [ANY]:
        if ANY not in facts:
            return None
        leading = facts[ANY]
    return [*leading, *(_stands_for(letter, facts) for letter in letters[letters[:1] == [ANY] :])]


def bind(shape: Shape, found: Dims, facts: Facts) -> bool:
    """Whether dims are of the shape a rule wants; if so, its letters stand for them from now on."""
    letters = list(shape(facts))
    if letters[:1] == [ANY]:
        facts.setdefault(ANY, found[: max(len(found) - len(letters) + 1, 0)])
    wanted = resolve(shape, facts)
    assert wanted is not None, "it is bound"
    if len(found) != len(wanted) or any(map(_differ, found, wanted)):
        return False
    own = letters[letters[:1] == [ANY] :]
    for letter, have in zip(own, found[len(found) - len(own) :], strict=True):
        if isinstance(letter, str) and (isinstance(have, int) or (have is not None and letter not in facts)):
            facts[letter] = have
    return True


def words(shape: Shape, facts: Facts) -> str:
    """Return a shape for a message, letters that stand for nothing as they are."""
    letters = list(shape(facts))
    resolved = resolve(shape, facts) or letters
    leading = len(resolved) - len(letters) + (letters[:1] == [ANY])
    own = zip(letters[letters[:1] == [ANY] :], resolved[leading:], strict=True)
    return show([*resolved[:leading], *(letter if size is None else size for letter, size in own)])


def show(dims: Dims) -> str:
    """Return dims for a message."""
    return f"({', '.join(map(str, dims))})"


def _stands_for(letter: int | str, facts: Facts) -> int | str | None:
    if isinstance(letter, int):
        return letter
    size: int | str | None = facts.get(letter)
    return size


def _differ(have: int | str | None, want: int | str | None) -> bool:
    """Whether two dims cannot be the same. A symbol may stand for any size."""
    return type(have) is type(want) and have != want
