"""What a model must look like to be walked layer by layer; looked at before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from optimc_passes.quantize.linears import LinearWeight

ATTENTION, ATTENTION_OUT, MLP, MLP_OUT = "self_attn", "o_proj", "mlp", "down_proj"
"""Module names that transformers' decoder layers share: the two halves, and the linear layer that each ends with."""

_LAYER = re.compile(r"(.*\blayers\.(\d+))\.")


def structure_problems(linears: Iterable[LinearWeight]) -> list[str]:
    """Return a sentence for the first decoder layer that lacks a part the walk goes by, and for linears elsewhere."""
    linears = tuple(linears)
    by_layer: dict[str, set[str]] = {}
    outside = []
    for linear in linears:
        found = _LAYER.match(linear.name)
        if found is not None:
            by_layer.setdefault(found[1], set()).add(linear.layer[len(found[1]) + 1 :])
        elif not linear.is_head:
            outside.append(linear.layer)
    problems = []
    if not by_layer:
        problems.append("the model has no decoder layers that could be calibrated one at a time")
    for layer, parts in by_layer.items():
        missing = [part for part in (f"{ATTENTION}.{ATTENTION_OUT}", f"{MLP}.{MLP_OUT}") if part not in parts]
        strange = [part for part in parts if not part.startswith((f"{ATTENTION}.", f"{MLP}."))]
        if missing or strange:
            told = [f"has no {part}" for part in missing] + [
                f"has {part}, which is in neither half" for part in strange
            ]
            problems.append(f"{layer} {', '.join(told)}: its layers cannot be calibrated one at a time; use rtn")
            break
    if outside:
        problems.append(f"{outside[0]} is in no decoder layer and cannot be calibrated; add it to ignore, or use rtn")
    return problems
