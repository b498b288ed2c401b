"""A cpu plan's program as text: what each operation reads and writes, and what that costs in weights.

T is the tokens of a step, R its rows that need logits. `b3[T, 0:576]` is columns 0 to 575 of buffer 3. For Medusa heads
T is the rows drafted for, and R as many for each head.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from optimc.cli.format import format_bytes
from optimc.errors import PlanError
from optimc.plan import Plan, program_section
from optimc.plan.cpu_program import (
    Buffer,
    CpuProgram,
    Elementwise,
    Embed,
    FloatBuffer,
    FloatWeight,
    IntWeight,
    Linear,
    Norm,
    Op,
    Quantize,
    Table,
    View,
    Weight,
)

_NAME, _FLOW, _WEIGHT, _BYTES = 28, 28, 14, 10
"""Widths of columns."""
_LINE = 100
"""Characters of a line at most."""
_WRITTEN = ("sum", "out")
_WEIGHT_FIELDS = ("table", "weight", "bias", "frequencies", "permutation")


def read_program(plan: Plan) -> CpuProgram:
    """Return the plan's program. Raises PlanError if its target has none that can be listed."""
    backend = plan.manifest.target.backend
    if backend != "cpu":
        raise PlanError(f"{plan.path}: built for target {backend}; only cpu and tensorrt have a program to list")
    return program_section.read_program(plan, CpuProgram)


def list_program(program: CpuProgram, tensor_bytes: Callable[[str], int]) -> Iterator[str]:
    """Yield the listing line by line; `tensor_bytes` gives the size of a plan tensor."""
    sizes = {name: _bytes_read(weight, tensor_bytes) for name, weight in program.weights.items()}
    yield from _list_ops(program.ops, program, sizes)
    if program.heads is not None:
        inputs = " ".join(_view(view, program) for view in program.heads.inputs)
        yield ""
        answers = _whole(program.heads.logits, program)
        yield from textwrap.wrap(f"heads: hidden states -> {inputs}, candidates from {answers}", _LINE)
        yield from _list_ops(program.heads.ops, program, sizes)
    yield ""
    yield f"{'buffer':<7} {'at':>13} {'holds':<40} name"
    for index, buffer in enumerate(program.buffers):
        yield f"b{index:<6} {buffer.offset:>13,} {_holds(buffer):<40} {_shortened(buffer.name, 37)}"
    yield ""
    heads = f" and {len(program.heads.ops)} of the heads" if program.heads is not None else ""
    yield (
        f"{len(program.ops)} operations{heads}, {len(program.buffers)} buffers, "
        f"arena {format_bytes(program.arena_bytes)} for {program.max_tokens} tokens"
    )
    yield f"weights read for one decoded token: {format_bytes(_total(program.ops, sizes))}"
    if program.heads is not None:
        yield f"weights read for one draft: {format_bytes(_total(program.heads.ops, sizes))}"


def _list_ops(ops: Sequence[Op], program: CpuProgram, sizes: Mapping[str, _Size]) -> Iterator[str]:
    yield _line("#", "operation", "from", "reads -> writes", "weight", "bytes")
    for index, op in enumerate(ops):
        names = _weights(op)
        nbytes = _total([op], sizes)
        scheme = _static_scale(op) or (_scheme(program.weights[names[0]]) if names else "")
        flow = textwrap.wrap(_flow(op, program), _FLOW) or [""]
        yield _line(str(index), op.op, _shortened(op.name, _NAME), flow[0], scheme, f"{nbytes:,}" if nbytes else "")
        for more in flow[1:]:
            yield _line("", "", "", more, "", "")


def _total(ops: Sequence[Op], sizes: Mapping[str, _Size]) -> int:
    """Return the bytes of weights that operations read."""
    return sum(
        sizes[name].as_row if isinstance(op, Embed) else sizes[name].whole for op in ops for name in _weights(op)
    )


class _Size(NamedTuple):
    """Bytes of a weight, read as a whole or one row of it."""

    whole: int
    as_row: int


def _bytes_read(weight: Weight, tensor_bytes: Callable[[str], int]) -> _Size:
    whole = tensor_bytes(weight.tensor)
    match weight:
        case IntWeight(outputs=rows) | FloatWeight(outputs=rows) | Table(rows=rows):
            return _Size(whole, whole // rows)
    return _Size(whole, whole)


def _weights(op: Op) -> list[str]:
    named = [name for field in _WEIGHT_FIELDS if (name := getattr(op, field, None)) is not None]
    return [*named, *(op.vectors if isinstance(op, Elementwise) else ())]


def _scheme(weight: Weight) -> str:
    match weight:
        case IntWeight():
            zeros = " zeros" if weight.zeros else ""
            return f"int{weight.bits} g{weight.group}{zeros}"
        case FloatWeight() | Table():
            return weight.dtype
    return ""


def _static_scale(op: Op) -> str:
    scale = op.scale if isinstance(op, Quantize) else op.quantized_scale if isinstance(op, Norm) else None
    return "" if scale is None else f"scale {scale:.2e}"


def _flow(op: Op, program: CpuProgram) -> str:
    read: list[str] = []
    written: list[str] = []
    for field in type(op).model_fields:
        value = getattr(op, field)
        if isinstance(value, View):
            (written if field in _WRITTEN else read).append(_view(value, program))
        elif field == "quantized" and value is not None:
            (read if isinstance(op, Linear) else written).append(_whole(value, program))
        elif field == "inputs":
            read += [_view(view, program) for view in value]
    # Wrapped between views only.
    return " ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in [*read, "->", *written])


def _view(view: View, program: CpuProgram) -> str:
    buffer = program.buffers[view.buffer]
    if isinstance(buffer, FloatBuffer) and view.width == buffer.width:
        return _whole(view.buffer, program)
    return f"b{view.buffer}[{_rows(buffer)}, {view.column}:{view.column + view.width}]"


def _whole(index: int, program: CpuProgram) -> str:
    buffer = program.buffers[index]
    width = buffer.width if isinstance(buffer, FloatBuffer) else buffer.features
    return f"b{index}[{_rows(buffer)}, {width}]"


def _rows(buffer: Buffer) -> str:
    return "T" if buffer.rows == "tokens" else "R"


def _holds(buffer: Buffer) -> str:
    if isinstance(buffer, FloatBuffer):
        return f"float32 [{_rows(buffer)}, {buffer.width}]"
    return f"int8 [{_rows(buffer)}, {buffer.features}], a scale per {buffer.group}"


def _line(index: str, operation: str, name: str, flow: str, weight: str, nbytes: str) -> str:
    flow = flow.replace("\N{NO-BREAK SPACE}", " ")
    cells = f"{index:>4} {operation:<11} {name:<{_NAME}} {flow:<{_FLOW}} {weight:<{_WEIGHT}} {nbytes:>{_BYTES}}"
    return cells.rstrip()


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"…{name[1 - width :]}"
