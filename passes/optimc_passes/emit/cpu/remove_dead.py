"""Drop what nobody reads."""

from __future__ import annotations

from optimc.plan.cpu_program import Attention, Norm, Op
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.operands import buffers_read, buffers_written


def remove_dead(draft: Draft) -> None:
    """Remove operations without an effect, and float results of norms that only their quantized result is read of.

    Attention always has an effect: it writes the pool.
    """
    live = {answer.buffer for answer in draft.answers}
    kept: list[Op] = []
    for op in reversed(draft.ops):
        if not isinstance(op, Attention) and not buffers_written(op) & live:
            continue
        if isinstance(op, Norm) and op.quantized is not None and op.out is not None and op.out.buffer not in live:
            op = op.model_copy(update={"out": None})
        live |= buffers_read(op)
        kept.append(op)
    draft.ops = kept[::-1]
