"""Results in place: an operation that works element for element may write over what it reads, if nobody reads it later.

So the residual stream stays where it is through the whole model, and the norms of queries and keys write into the
projection they read.
"""

from __future__ import annotations

from typing import NamedTuple

from optimc.plan.cpu_program import Elementwise, Linear, Norm, Op, View
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.operands import overlap, reading_ends, reads, with_views


def share_buffers(draft: Draft) -> None:
    """Give results the place of an operand where that is safe. Afterwards buffers are written more than once."""
    assert draft.logits is not None
    answer, end_of_step = draft.logits.buffer, len(draft.ops)
    readers: dict[int, list[_Reading]] = {}
    for view in draft.answers:
        readers.setdefault(view.buffer, []).append(_Reading(end_of_step, end_of_step, view))
    for place, (op, end) in enumerate(zip(draft.ops, reading_ends(draft.ops), strict=True)):
        for view in reads(op):
            readers.setdefault(view.buffer, []).append(_Reading(place, end, view))
    moved: dict[int, View] = {}
    """Where a buffer's value lies, if not in the buffer itself."""

    def located(view: View) -> View:
        home = moved.get(view.buffer)
        if home is None:
            return view
        return View(buffer=home.buffer, column=home.column + view.column, width=view.width)

    for place, op in enumerate(draft.ops):
        over = _may_write_over(op)
        if not over:
            continue
        out = _out(op)
        for view in over:
            read_later = any(
                reading.end >= place and reading.place != place and overlap(reading.view, view)
                for reading in readers[view.buffer]
            )
            others = [located(other) for other in [*_read_whole(op), *(other for other in over if other != view)]]
            home = located(view)
            if (
                view.width == out.width
                and draft.rows_of(view) == draft.rows_of(out)
                and not read_later
                and not any(overlap(other, home) for other in others)
                and (draft.is_whole(home) or out.buffer != answer)
            ):
                moved[out.buffer] = home
                break
    draft.ops = [with_views(op, located, located) for op in draft.ops]
    draft.logits = located(draft.logits)
    draft.hidden = None if draft.hidden is None else located(draft.hidden)


class _Reading(NamedTuple):
    """An operation that reads a view, and the place by whose end all threads have."""

    place: int
    end: int
    view: View


def _may_write_over(op: Op) -> list[View]:
    """Return the operands each of whose elements is read only to compute the same element of the result."""
    match op:
        case Elementwise():
            return list(op.inputs)
        case Linear(residual=View() as residual):
            return [residual]
        case Norm(out=View(), after=after):
            return [op.x] if after is None else [after, op.x]
    return []


def _read_whole(op: Op) -> list[View]:
    """Return the operands of which an element of the result needs a whole row."""
    return [op.x] if isinstance(op, Linear) and op.x is not None else []


def _out(op: Op) -> View:
    assert isinstance(op, Elementwise | Linear | Norm)
    assert op.out is not None
    return op.out
