"""A dense table that is the output head as well lies in the plan once, in the head's panels."""

from __future__ import annotations

from optimc.plan.cpu_program import Embed
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.weights import FloatSource, TableSource


def share_tied_table(draft: Draft) -> None:
    """Let lookups read the panels of a linear weight where that is the same matrix, and drop the table."""
    panels = {
        id(source.constant.transpose_of): key
        for key, source in draft.weights.items()
        if isinstance(source, FloatSource) and source.gate is None
    }
    for place, op in enumerate(draft.ops):
        if not isinstance(op, Embed):
            continue
        table = draft.weights[op.table]
        shared = panels.get(id(table.constant)) if isinstance(table, TableSource) else None
        if shared is not None:
            draft.ops[place] = op.model_copy(update={"table": shared})
