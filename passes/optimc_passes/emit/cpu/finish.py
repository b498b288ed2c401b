"""A draft becomes the program: buffers get places, weights get tensors, what nobody uses is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optimc.plan import PlanTensor
from optimc.plan.cpu_program import CpuProgram, Linear, Norm, Op, Quantize, View, Weight
from optimc_passes.emit.cpu.buffers import lifetimes, place_buffers
from optimc_passes.emit.cpu.draft import Draft, FloatRows, QuantizedRows
from optimc_passes.emit.cpu.operands import weights, with_views


def finish(draft: Draft, max_tokens: int) -> tuple[CpuProgram, list[PlanTensor]]:
    """Return the program and the plan tensors it names, in the order of their first use.

    `max_tokens` is the most rows a step may have.
    """
    assert draft.logits is not None
    lives = lifetimes(draft, max_tokens)
    offsets, arena_bytes = place_buffers(list(lives.values()))
    index, buffers = _merge_equal(draft, dict(zip(lives, offsets, strict=True)))
    keys = list(dict.fromkeys(key for op in draft.ops for key in weights(op)))
    described: dict[str, Weight] = {key: draft.weights[key].describe(f"weights/{key}") for key in keys}
    program = CpuProgram.model_validate(
        {
            "max_tokens": max_tokens,
            "weights": {key: weight.model_dump() for key, weight in described.items()},
            "buffers": buffers,
            "arena_bytes": arena_bytes,
            "ops": [_renumbered(op, index).model_dump() for op in draft.ops],
            "logits": index[draft.logits.buffer],
        }
    )
    return program, [draft.weights[key].plan_tensor(f"weights/{key}") for key in keys]


def _merge_equal(draft: Draft, offsets: dict[int, int]) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """Return the program's buffers, and which of them each of the draft's is: layers alike use the same ones.

    Buffers of one form at one place are one buffer, named after its first use.
    """
    index: dict[int, int] = {}
    places: dict[tuple[FloatRows | QuantizedRows, int], int] = {}
    described: list[dict[str, Any]] = []
    for buffer, offset in offsets.items():
        form = draft.buffers[buffer]
        unnamed = replace(form, name="")
        if (unnamed, offset) not in places:
            places[unnamed, offset] = len(described)
            kind = "float" if isinstance(form, FloatRows) else "quantized"
            described.append({"kind": kind, **vars(form), "offset": offset})
        index[buffer] = places[unnamed, offset]
    return index, described


def _renumbered(op: Op, index: dict[int, int]) -> Op:
    def numbered(view: View) -> View:
        return view.model_copy(update={"buffer": index[view.buffer]})

    op = with_views(op, numbered, numbered)
    if isinstance(op, Norm | Quantize | Linear) and op.quantized is not None:
        return op.model_copy(update={"quantized": index[op.quantized]})
    return op
