"""Compute only the rows somebody reads: gathers of the rows that need logits move up to where all rows are needed.

A value is needed for every token if attention reads it, or something computed for every token does. What lies after
the last attention is not, so a prefill computes the last layer's attention, output projection and MLP for a few rows
only.
"""

from __future__ import annotations

from dataclasses import replace

from optimc.plan.cpu_program import Attention, Elementwise, GatherRows, Linear, Norm, Op, PermuteFeatures, View
from optimc_passes.emit.cpu.draft import Draft, FloatRows
from optimc_passes.emit.cpu.operands import buffers_read, buffers_written, with_views

_ROW_WISE = (Elementwise, Linear, Norm, PermuteFeatures)
"""Operations whose result in one row depends on that row of their operands alone."""


def hoist_rows(draft: Draft) -> None:
    """Gather rows right after the last values that are needed for every token."""
    assert draft.logits is not None
    needed = _needed_for_all_tokens(draft)
    gathers: dict[int, GatherRows] = {}
    """Buffer of all tokens to the operation that picks its rows."""
    same: dict[int, View] = {}
    """What stands for the result of a gather that has moved."""

    def renamed(view: View) -> View:
        source = same.get(view.buffer)
        if source is None:
            return view
        return View(buffer=source.buffer, column=source.column + view.column, width=view.width)

    def picked(view: View) -> View:
        """Return the view's rows that need logits."""
        buffer = draft.buffers[view.buffer]
        assert isinstance(buffer, FloatRows)
        if buffer.rows == "logits":
            return view
        if view.buffer not in gathers:
            whole = View(buffer=view.buffer, column=0, width=buffer.width)
            out = draft.new_rows(f"{buffer.name}.rows", "logits", buffer.width)
            gathers[view.buffer] = GatherRows(name=buffer.name, x=whole, out=out)
        return view.model_copy(update={"buffer": gathers[view.buffer].out.buffer})

    ops: list[Op] = []
    for original in draft.ops:
        op = with_views(original, renamed, lambda view: view)
        if isinstance(op, GatherRows):
            same[op.out.buffer] = picked(op.x)
            continue
        if isinstance(op, _ROW_WISE) and not buffers_written(op) & needed:
            op = with_views(op, picked, lambda view: view)
            for index in buffers_written(op):
                draft.buffers[index] = replace(draft.buffers[index], rows="logits")
        ops.append(op)
    draft.ops = []
    for op in ops:
        if isinstance(op, Attention) and op.out.buffer in gathers and op.out.buffer not in needed:
            op = op.model_copy(update={"logits_rows_only": True})
        draft.ops += [op, *(gathers[index] for index in buffers_written(op) if index in gathers)]
    draft.logits = renamed(draft.logits)


def _needed_for_all_tokens(draft: Draft) -> set[int]:
    needed: set[int] = set()
    for op in reversed(draft.ops):
        if isinstance(op, Attention) or (not isinstance(op, GatherRows) and buffers_written(op) & needed):
            needed |= buffers_read(op)
    return needed
