"""A draft becomes the program: buffers get places, weights get tensors, what nobody uses is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optimc.plan import PlanTensor
from optimc.plan.cpu_program import HEADS_VERSION, PROGRAM_VERSION, CpuProgram, Linear, Norm, Op, Quantize, View
from optimc_passes.emit.cpu.buffers import buffer_bytes, lifetimes, place_buffers
from optimc_passes.emit.cpu.draft import Draft, FloatRows, QuantizedRows
from optimc_passes.emit.cpu.heads import HeadsDraft
from optimc_passes.emit.cpu.operands import weights, with_views


def finish(draft: Draft, max_tokens: int, heads: HeadsDraft | None = None) -> tuple[CpuProgram, list[PlanTensor]]:
    """Return the program and the plan tensors it names, in the order of their first use.

    `max_tokens` is the most rows a step may have. Buffers of `heads` lie behind those of the model.
    """
    assert draft.logits is not None
    lives = lifetimes(draft, max_tokens)
    offsets, arena_bytes = place_buffers(list(lives.values()))
    index, buffers = _merge_equal(draft, dict(zip(lives, offsets, strict=True)))
    keys = list(dict.fromkeys(key for op in draft.ops for key in weights(op)))
    entered = [(key, f"weights/{key}", draft.weights[key]) for key in keys]
    hidden = None if draft.hidden is None else _numbered(draft.hidden, index).model_dump()
    described_heads = None
    if heads is not None:
        entered += [(key, key, heads.weights[key]) for op in heads.ops for key in weights(op) if key in heads.weights]
        more, arena_bytes = _behind(heads, arena_bytes, max_tokens)
        described_heads = _describe(heads, len(buffers))
        buffers += more
    program = CpuProgram.model_validate(
        {
            "version": PROGRAM_VERSION if hidden is None else HEADS_VERSION,
            "max_tokens": max_tokens,
            "weights": {key: source.describe(tensor).model_dump() for key, tensor, source in entered},
            "buffers": buffers,
            "arena_bytes": arena_bytes,
            "ops": [_renumbered(op, index).model_dump() for op in draft.ops],
            "logits": index[draft.logits.buffer],
            "hidden": hidden,
            "heads": described_heads,
        }
    )
    return program, [source.plan_tensor(tensor) for _, tensor, source in entered]


def _behind(heads: HeadsDraft, arena_bytes: int, max_tokens: int) -> tuple[list[dict[str, Any]], int]:
    """Return the heads' buffers, each at a place of its own behind the model's, and where they end.

    What the last step answered stays as it is while the heads run: they may be given it as it lies.
    """
    described: list[dict[str, Any]] = []
    for number, form in enumerate(heads.buffers):
        if number in heads.same_memory:
            offset = described[heads.same_memory[number]]["offset"]
        else:
            offset, arena_bytes = arena_bytes, arena_bytes + buffer_bytes(form, max_tokens)
        described.append(_described(form, offset))
    return described, arena_bytes


def _describe(heads: HeadsDraft, first: int) -> dict[str, Any]:
    assert heads.logits is not None
    index = {number: first + number for number in range(len(heads.buffers))}
    return {
        "inputs": [_numbered(view, index).model_dump() for view in heads.inputs],
        "logits": index[heads.logits.buffer],
        "ops": [_renumbered(op, index).model_dump() for op in heads.ops],
    }


def _merge_equal(draft: Draft, offsets: dict[int, int]) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """Return the program's buffers, and which of them each of the draft's is: layers alike use the same ones.

    Buffers of one form at one place are one buffer, named after its first use. The norm that computes the hidden
    states writes its quantized buffer together with them: were it the one other norms write, no thread could fill its
    own copy of that.
    """
    beside_hidden = {
        op.quantized
        for op in draft.ops
        if isinstance(op, Norm)
        and op.out is not None
        and draft.hidden is not None
        and op.out.buffer == draft.hidden.buffer
    }
    index: dict[int, int] = {}
    places: dict[tuple[FloatRows | QuantizedRows, int, bool], int] = {}
    described: list[dict[str, Any]] = []
    for buffer, offset in offsets.items():
        form = draft.buffers[buffer]
        key = replace(form, name=""), offset, buffer in beside_hidden
        if key not in places:
            places[key] = len(described)
            described.append(_described(form, offset))
        index[buffer] = places[key]
    return index, described


def _described(form: FloatRows | QuantizedRows, offset: int) -> dict[str, Any]:
    return {"kind": "float" if isinstance(form, FloatRows) else "quantized", **vars(form), "offset": offset}


def _renumbered(op: Op, index: dict[int, int]) -> Op:
    def numbered(view: View) -> View:
        return _numbered(view, index)

    op = with_views(op, numbered, numbered)
    if isinstance(op, Norm | Quantize | Linear) and op.quantized is not None:
        return op.model_copy(update={"quantized": index[op.quantized]})
    return op


def _numbered(view: View, index: dict[int, int]) -> View:
    return view.model_copy(update={"buffer": index[view.buffer]})
