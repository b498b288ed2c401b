"""A CpuProgram in plain NumPy: what the native executor must compute, written from the contract alone.

Unpacks weights byte by byte as `optimc.plan.cpu_program` says, shares no code with the packer, and keeps every buffer
at its place in one arena, so that two values that must not share bytes are seen to if they do.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from optimc.plan.cpu_program import (
    Attention,
    CpuProgram,
    Elementwise,
    Embed,
    FloatBuffer,
    FloatWeight,
    GatherRows,
    IntWeight,
    Linear,
    Norm,
    PermuteFeatures,
    Quantize,
    QuantizedBuffer,
    Rotation,
    Table,
    View,
)
from optimc_passes.dialect.paged_attention import PagedAttention, causal_attention
from optimc_passes.emit import Lowered

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_erf = np.vectorize(math.erf, otypes=[np.float32])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "exp": np.exp,
    "log": np.log,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "erf": _erf,
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / np.float32(np.sqrt(2)))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(x, 0),
    "sin": np.sin,
    "cos": np.cos,
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
}


def unpack_int(weight: IntWeight, data: np.ndarray) -> np.ndarray:
    """Dequantize [panels * 32, C]."""
    panels, groups = -(-weight.outputs // 32), -(-weight.features // weight.group)
    dense = np.empty((panels * 32, weight.features), np.float32)
    row = np.arange(32)[:, None]
    at = 0
    for panel in range(panels):
        for g in range(groups):
            first = g * weight.group
            size = min(weight.group, weight.features - first)
            stored = -(-size // 8) * 8
            dtype = np.dtype(np.float32 if weight.wide_scales else np.float16)
            scales = data[at : at + 32 * dtype.itemsize].view(dtype).astype(np.float32)
            at += 32 * dtype.itemsize
            zeros = np.full(32, weight.zero_point, np.float32)
            if weight.zeros:
                zeros = data[at : at + 32].astype(np.float32)
                at += 32
            feature = np.arange(size)[None, :]
            place = row // 16 * 64 + row % 16 * 4 + feature % 4
            if weight.bits == 4:
                codes = data[at + feature // 8 * 128 + place] >> (4 * (feature % 8 // 4)).astype(np.uint8) & 15
                at += stored * 16
            else:
                codes = data[at + feature // 4 * 128 + place]
                at += stored * 32
            rows = slice(panel * 32, panel * 32 + 32)
            dense[rows, first : first + size] = (codes.astype(np.float32) - zeros[:, None]) * scales[:, None]
    assert at == len(data), (at, len(data))
    return dense


def unpack_float(weight: FloatWeight, data: np.ndarray) -> np.ndarray:
    """Widen [panels * 32, C]."""
    elements = data.view(DTYPES[weight.dtype]).astype(np.float32)
    panels = elements.reshape(-1, weight.features, 32)
    assert len(panels) == -(-weight.outputs // 32)
    return panels.transpose(0, 2, 1).reshape(-1, weight.features)


class Interpreter:
    """Runs a lowered model on one sequence without context."""

    def __init__(self, lowered: Lowered) -> None:
        self.program = CpuProgram.model_validate(lowered.program)
        loaded = {tensor.name: (tensor, np.ascontiguousarray(tensor.load())) for tensor in lowered.tensors}
        for tensor, array in loaded.values():
            assert array.nbytes == tensor.nbytes, tensor.name
        self.data = {name: array for name, (_, array) in loaded.items()}
        self.dense: dict[str, np.ndarray] = {}
        for name, weight in self.program.weights.items():
            self.dense[name] = self._unpack(weight)

    def _unpack(self, weight: Any) -> np.ndarray:
        data = self.data[weight.tensor]
        if isinstance(weight, IntWeight):
            return unpack_int(weight, data)
        if isinstance(weight, FloatWeight):
            return unpack_float(weight, data)
        if isinstance(weight, Table):
            assert data.shape == (weight.rows, weight.features)
            assert data.dtype == DTYPES[weight.dtype]
            return data.astype(np.float32)
        assert data.shape == (weight.length,)
        assert data.dtype == (np.float32 if weight.kind == "vector" else np.int32)
        return data

    def run(self, tokens: np.ndarray, logits_rows: np.ndarray) -> np.ndarray:
        """Return logits [R, V]."""
        self.tokens, self.logits_rows = tokens, logits_rows
        assert max(len(tokens), len(logits_rows)) <= self.program.max_tokens
        # All ones is NaN: what is read before it is written shows.
        self.arena = np.full(self.program.arena_bytes, 255, np.uint8)
        with np.errstate(over="ignore"):
            for op in self.program.ops:
                getattr(self, f"_{op.op}")(op)
        if self.program.hidden is not None:
            self.hidden = self._view(self.program.hidden).copy()
        logits = self._buffer(self.program.buffers[self.program.logits])
        return logits.copy()

    def _rows(self, kind: str) -> int:
        return len(self.tokens if kind == "tokens" else self.logits_rows)

    def _buffer(self, buffer: FloatBuffer) -> np.ndarray:
        rows = self._rows(buffer.rows)
        data = self.arena[buffer.offset : buffer.offset + rows * buffer.width * 4]
        return data.view(np.float32).reshape(rows, buffer.width)

    def _view(self, view: View) -> np.ndarray:
        return self._buffer(self.program.buffers[view.buffer])[:, view.column : view.column + view.width]

    def _read(self, view: View) -> np.ndarray:
        return self._view(view).copy()

    def _quantized(self, index: int, term: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales and sums of one term, at their aligned places."""
        buffer = self.program.buffers[index]
        assert isinstance(buffer, QuantizedBuffer)
        rows, most = self._rows(buffer.rows), self.program.max_tokens
        groups = -(-buffer.features // buffer.group)
        padded = sum(-(-size // 8) * 8 for size in self._sizes(buffer))
        at, parts = buffer.offset, []
        for dtype, width in ((np.int8, padded), (np.float32, groups), (np.int32, groups)):
            size = np.dtype(dtype).itemsize * width
            start = at + term * most * size
            parts.append(self.arena[start : start + rows * size].view(dtype).reshape(rows, width))
            at += -(-buffer.terms * most * size // 64) * 64
        return parts[0], parts[1], parts[2]

    @staticmethod
    def _sizes(buffer: QuantizedBuffer) -> list[int]:
        return [min(buffer.group, buffer.features - first) for first in range(0, buffer.features, buffer.group)]

    def _round(self, x: np.ndarray, index: int, permutation: str | None, static: float | None) -> None:
        if permutation is not None:
            x = x[:, self.dense[permutation]]
        assert static is None or self.program.buffers[index].terms == 1
        for term in range(self.program.buffers[index].terms):
            self._round_term(x, index, term, static)
            x = x - self._rounded_term(index, term)

    def _round_term(self, x: np.ndarray, index: int, term: int, static: float | None) -> None:
        buffer = self.program.buffers[index]
        codes, scales, sums = self._quantized(index, term)
        assert x.shape[1] == buffer.features
        codes[:] = 0
        at = first = 0
        for g, size in enumerate(self._sizes(buffer)):
            part = x[:, first : first + size]
            scale = np.abs(part).max(axis=1) / np.float32(127)
            if static is not None:
                scale = np.full(len(part), static, np.float32)
            rounded = np.clip(np.rint(part / np.where(scale == 0, 1, scale)[:, None]), -127, 127)
            codes[:, at : at + size] = rounded
            scales[:, g], sums[:, g] = scale, rounded.sum(axis=1)
            at, first = at + -(-size // 8) * 8, first + size

    def _rounded(self, index: int) -> np.ndarray:
        return sum(self._rounded_term(index, term) for term in range(self.program.buffers[index].terms))

    def _rounded_term(self, index: int, term: int) -> np.ndarray:
        buffer = self.program.buffers[index]
        codes, scales, sums = self._quantized(index, term)
        at, parts = 0, []
        for g, size in enumerate(self._sizes(buffer)):
            part = codes[:, at : at + size].astype(np.float32)
            np.testing.assert_array_equal(part.sum(axis=1), sums[:, g])
            parts.append(part * scales[:, g : g + 1])
            at += -(-size // 8) * 8
        return np.concatenate(parts, axis=1)

    def _embed(self, op: Embed) -> None:
        self._view(op.out)[:] = self.dense[op.table][self.tokens] * np.float32(op.scale)

    def _norm(self, op: Norm) -> None:
        x = self._read(op.x)
        after = None if op.after is None else self._read(op.after)
        if op.before is not None:
            x += self._read(op.before)
        if op.sum is not None:
            self._view(op.sum)[:] = x
        heads = x.reshape(len(x), op.heads, x.shape[1] // op.heads)
        if op.centred:
            heads = heads - heads.mean(axis=-1, keepdims=True)
        variance = np.mean(heads * heads, axis=-1, keepdims=True)
        result = heads / np.sqrt(variance + np.float32(op.epsilon)) * self.dense[op.weight]
        if op.bias is not None:
            result += self.dense[op.bias]
        result = result.reshape(x.shape)
        if after is not None:
            result = after + result
        if op.out is not None:
            self._view(op.out)[:] = result
        if op.quantized is not None:
            self._round(result, op.quantized, op.permutation, op.quantized_scale)

    def _quantize(self, op: Quantize) -> None:
        self._round(self._read(op.x), op.quantized, op.permutation, op.scale)

    def _linear(self, op: Linear) -> None:
        weight = self.program.weights[op.weight]
        assert (op.x is None) != (op.quantized is None)
        if op.quantized is not None:
            buffer = self.program.buffers[op.quantized]
            assert isinstance(weight, IntWeight)
            assert (buffer.features, buffer.group) == (weight.features, weight.group)
        x = self._rounded(op.quantized) if op.x is None else self._read(op.x)
        product = x @ self.dense[op.weight].T
        if op.bias is not None:
            assert len(self.dense[op.bias]) == product.shape[1]
            product += self.dense[op.bias]
        width = op.out.width
        if op.gate == "none":
            result = product[:, :width]
            assert weight.outputs == width
        else:
            assert op.residual is None
            assert weight.outputs == -(-width // 32) * 32 + width
            halves = product.reshape(len(product), product.shape[1] // 64, 2, 32)
            gate, up = (halves[:, :, half].reshape(len(product), product.shape[1] // 2)[:, :width] for half in (0, 1))
            result = UNARY[op.gate](gate) * up
        if op.residual is not None:
            result = self._read(op.residual) + result
        self._view(op.out)[:] = result

    def _rotation(self, op: Rotation) -> None:
        angles = np.arange(len(self.tokens), dtype=np.float32)[:, None] * self.dense[op.frequencies]
        self._view(op.out)[:] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(op.scale)

    def _attention(self, op: Attention) -> None:
        spec = PagedAttention(op.layer, op.num_heads, op.num_kv_heads, op.head_dim, op.scale, op.window, op.softcap)
        q, k = self._turn(self._read(op.q), op), self._turn(self._read(op.k), op)
        self._view(op.out)[:] = causal_attention(spec, q, k, self._read(op.v))

    def _turn(self, x: np.ndarray, op: Attention) -> np.ndarray:
        if op.rotation is None:
            return x
        cos, sin = np.split(self._read(op.rotation)[:, None, :], 2, axis=2)
        heads = x.reshape(len(x), -1, op.head_dim)
        turned = heads.copy()
        width = 2 * cos.shape[2]
        pair = (
            (slice(0, width, 2), slice(1, width, 2))
            if op.interleaved
            else (slice(0, width // 2), slice(width // 2, width))
        )
        first, second = heads[..., pair[0]], heads[..., pair[1]]
        turned[..., pair[0]] = first * cos - second * sin
        turned[..., pair[1]] = first * sin + second * cos
        return turned.reshape(x.shape)

    def _elementwise(self, op: Elementwise) -> None:
        inputs = [self._read(view) for view in op.inputs]
        values: list[Any] = []
        for step in op.steps:
            if step.op == "rows":
                values.append(inputs[step.a])
            elif step.op == "vector":
                values.append(self.dense[op.vectors[step.a]])
            elif step.op == "constant":
                values.append(np.float32(step.value))
            elif step.op in UNARY:
                values.append(UNARY[step.op](values[step.a]))
            else:
                values.append(BINARY[step.op](values[step.a], values[step.b]))
        self._view(op.out)[:] = values[-1]

    def _gather_rows(self, op: GatherRows) -> None:
        self._view(op.out)[:] = self._read(op.x)[self.logits_rows]

    def _permute(self, op: PermuteFeatures) -> None:
        self._view(op.out)[:] = self._read(op.x)[:, self.dense[op.permutation]]


def memory_faults(program: CpuProgram) -> list[str]:
    """Return where an operation writes what it, or a thread that is still rounding, reads.

    An operation may write over an operand only element for element: elementwise inputs, the residual of a linear layer,
    what a norm reads. Threads do not wait for each other after an operation that only rounds, so what it reads must
    stay until the next operation that does not has ended.
    """
    faults = []
    rounding: list[View] = []
    for place, op in enumerate(program.ops):
        written = [view for view in (getattr(op, "out", None), getattr(op, "sum", None)) if view is not None]
        element_wise, whole = _operands(op)
        for out in written:
            faults += [
                f"{place} {op.name}: writes {out} over {view}"
                for view in element_wise
                if view != out and _meet(program, out, view)
            ]
            faults += [
                f"{place} {op.name}: writes {out} over {v}" for v in [*whole, *rounding] if _meet(program, out, v)
            ]
        quantized = getattr(op, "quantized", None)
        if isinstance(op, Linear) and quantized is not None:
            faults += [
                f"{place} {op.name}: writes over its codes"
                for out in written
                if _bytes_meet(program, out.buffer, quantized)
            ]
        if isinstance(op, Norm | Quantize) and quantized is not None:
            operands = [*element_wise, *whole]
            faults += [
                f"{place} {op.name}: codes over {v}" for v in operands if _bytes_meet(program, v.buffer, quantized)
            ]
            rounding += operands
        else:
            rounding = []
    return faults + _lost_hidden(program)


def _lost_hidden(program: CpuProgram) -> list[str]:
    """Return where an operation writes over the hidden states, which must stay until the step has ended."""
    if program.hidden is None:
        return []
    faults: list[str] = []
    for place, op in enumerate(program.ops):
        written = [view for view in (getattr(op, "out", None), getattr(op, "sum", None)) if view is not None]
        quantized = None if isinstance(op, Linear) else getattr(op, "quantized", None)
        if program.hidden in written:
            faults = []  # what lay there before were other values
        elif any(_meet(program, view, program.hidden) for view in written) or (
            quantized is not None and _bytes_meet(program, quantized, program.hidden.buffer)
        ):
            faults.append(f"{place} {op.name}: writes over the hidden states")
    return faults


def _operands(op: Any) -> tuple[list[View], list[View]]:
    """Views read element for element, and views of which a result needs more."""
    if isinstance(op, Elementwise):
        return list(op.inputs), []
    if isinstance(op, Norm):
        return [view for view in (op.x, op.before, op.after) if view is not None], []
    if isinstance(op, Linear):
        return [op.residual] if op.residual else [], [op.x] if op.x else []
    if isinstance(op, Attention):
        return [], [view for view in (op.q, op.k, op.v, op.rotation) if view is not None]
    return [], [op.x] if hasattr(op, "x") else []


def _meet(program: CpuProgram, first: View, second: View) -> bool:
    if first.buffer == second.buffer:
        return first.column < second.column + second.width and second.column < first.column + first.width
    return _bytes_meet(program, first.buffer, second.buffer)


def _bytes_meet(program: CpuProgram, first: int, second: int) -> bool:
    (start, stop), (other_start, other_stop) = (buffer_span(program, index) for index in (first, second))
    return start < other_stop and other_start < stop


def buffer_span(program: CpuProgram, index: int) -> tuple[int, int]:
    """First byte of a buffer and the one after its last."""
    buffer, rows = program.buffers[index], program.max_tokens
    if isinstance(buffer, FloatBuffer):
        return buffer.offset, buffer.offset + rows * buffer.width * 4
    sizes = Interpreter._sizes(buffer)
    parts = [rows * sum(-(-size // 8) * 8 for size in sizes), 4 * rows * len(sizes), 4 * rows * len(sizes)]
    return buffer.offset, buffer.offset + sum(-(-part // 64) * 64 for part in parts)
