"""Hidden states as an answer of the program: what the output head multiplies, before it is rounded or reordered."""

from __future__ import annotations

from optimc.errors import LoweringError
from optimc.plan.cpu_program import Elementwise, Linear, Op, PermuteFeatures, View
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.operands import writes


def find_hidden(draft: Draft) -> View:
    """Return the columns the output head multiplies, for the rows that need logits.

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
    hidden = op.x
    while isinstance(before := writers.get(hidden.buffer), PermuteFeatures) and hidden == before.out:
        hidden = before.x
    return hidden
