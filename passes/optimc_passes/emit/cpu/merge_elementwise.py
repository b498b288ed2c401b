"""Chains of elementwise operations become one: what lies between them never reaches memory."""

from __future__ import annotations

from optimc.plan.cpu_program import Elementwise
from optimc_passes.emit.cpu.draft import Draft, Edit
from optimc_passes.emit.cpu.expression import Expression


def merge_elementwise(draft: Draft) -> None:
    """Include in each expression those it reads, where nobody else reads them and the steps suffice."""
    edit = Edit(draft)
    for place, op in enumerate(draft.ops):
        if not isinstance(op, Elementwise):
            continue
        for view in op.inputs:
            at = edit.sole_writer(view)
            inner = None if at is None else edit.ops[at]
            current = edit.ops[place]
            if at is None or not isinstance(inner, Elementwise) or not isinstance(current, Elementwise):
                continue
            merged = _merge(inner, current)
            if merged is not None:
                edit.replace(at, None)
                edit.replace(place, merged)
    edit.finish()


def _merge(inner: Elementwise, outer: Elementwise) -> Elementwise | None:
    expression = Expression()
    result = expression.include(inner, {})
    result = expression.include(outer, {outer.inputs.index(inner.out): result})
    return expression.build(outer.name, result, outer.out)
