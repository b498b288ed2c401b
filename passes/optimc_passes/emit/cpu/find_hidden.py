"""Hidden states as an answer of the program: what the output head multiplies, before it is rounded or reordered."""

from __future__ import annotations

from typing import NamedTuple

from optimc.errors import LoweringError
from optimc.plan.cpu_program import Elementwise, Linear, Op, PermuteFeatures, View
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.operands import writes


class OutputHead(NamedTuple):
    """The linear layer that ends the graph."""

    hidden: View
    """The columns it multiplies, of the rows that need logits."""
    weight: str
    """Its key."""
    order: str | None
    """Key of the permutation that says in which order the weight has its features."""


def find_head(draft: Draft) -> OutputHead:
    """Return the output head of a draft whose gathers of rows have moved, and nothing else has.

    Nothing but elementwise operations of one operand may lie behind the head. Raises LoweringError if the graph does
    not end in a linear layer.
    """
    writers = {view.buffer: op for op in draft.ops for view in writes(op)}
    assert draft.logits is not None
    op: Op | None = writers[draft.logits.buffer]
    while isinstance(op, Elementwise) and len(op.inputs) == 1:
        op = writers.get(op.inputs[0].buffer)
    if not isinstance(op, Linear) or op.x is None:
        found = "nothing" if op is None else f"{op.op} '{op.name}'"
        raise LoweringError(
            f"hidden states are asked for, and the logits come from no linear layer but from {found}; leave out the "
            "pass that needs them"
        )
    before = writers.get(op.x.buffer)
    if isinstance(before, PermuteFeatures) and before.out == op.x:
        return OutputHead(before.x, op.weight, before.permutation)
    return OutputHead(op.x, op.weight, None)
