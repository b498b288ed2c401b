"""Activations in 8 bits for products with integer weights: one scale per row and group of the weight.

The rounding is done once per value and group size, by the norm that computes the value where there is one.
"""

from __future__ import annotations

from dataclasses import replace

from optimc.errors import LoweringError
from optimc.plan.cpu_program import Linear, Norm, Op, PermuteFeatures, Quantize, View
from optimc.recipe.model import ActivationScales
from optimc_passes.emit.cpu.draft import Draft, Edit
from optimc_passes.emit.cpu.weights import IntSource

LARGEST_GROUP = 128
"""Features that share an activation's scale at most, unless a whole row does: beyond it, outliers cost too much."""


def quantize_activations(draft: Draft, scales: ActivationScales) -> None:
    """Let every linear layer with integer weights read activations in 8 bits.

    Raises LoweringError for scales per row where a weight has several groups per row.
    """
    edit = Edit(draft)
    quantized: dict[tuple[View, str | None, int], int] = {}
    """Value, order of its features and group size, to the buffer of its codes."""
    before: dict[int, list[Quantize]] = {}
    """Roundings to insert before a place."""
    for place, op in enumerate(draft.ops):
        source = draft.weights[op.weight] if isinstance(op, Linear) else None
        if not (isinstance(op, Linear) and isinstance(source, IntSource)):
            continue
        group = activation_group(op.weight, source, scales)
        draft.weights[op.weight] = replace(source, stored_group=group)
        x, permutation = _source(edit, op)
        key = x, permutation, group
        if key not in quantized:
            quantized[key] = draft.new_quantized(f"{op.name}.x", draft.rows_of(x), x.width, group)
            if not _in_norm(edit, x, permutation, quantized[key]):
                rounding = Quantize(name=op.name, x=x, quantized=quantized[key], permutation=permutation)
                before.setdefault(place, []).append(rounding)
        edit.replace(place, op.model_copy(update={"x": None, "quantized": quantized[key]}))
    ops: list[Op] = []
    for place, edited in enumerate(edit.ops):
        assert edited is not None
        ops += [*before.get(place, []), edited]
    draft.ops = ops


def activation_group(name: str, weight: IntSource, scales: ActivationScales) -> int:
    """Return the group size of a weight's activations, with which the weight is packed.

    Weight groups above `LARGEST_GROUP` are split where a multiple of 8 divides them.
    """
    group, features = weight.group, weight.features
    if scales == "row":
        if group < features:
            raise LoweringError(
                f"{name}: its {features} input features are in groups of {group}; one activation scale per row needs "
                f"one group per row (group_size: -1), or use activation_scales: group"
            )
        return features
    if group <= LARGEST_GROUP:
        return group
    return next((size for size in range(LARGEST_GROUP, 0, -8) if group % size == 0), group)


def _source(edit: Edit, op: Linear) -> tuple[View, str | None]:
    """Return what the layer reads before its features are reordered, and the order."""
    assert op.x is not None
    at = edit.writer(op.x)
    permute = None if at is None else edit.ops[at]
    return (permute.x, permute.permutation) if isinstance(permute, PermuteFeatures) else (op.x, None)


def _in_norm(edit: Edit, x: View, permutation: str | None, quantized: int) -> bool:
    """Let the norm that computes x round it too, if one does that has not another rounding to do."""
    at = edit.writer(x)
    norm = None if at is None else edit.ops[at]
    if at is None or not isinstance(norm, Norm) or norm.heads != 1 or norm.quantized is not None:
        return False
    edit.replace(at, norm.model_copy(update={"quantized": quantized, "permutation": permutation}))
    return True
