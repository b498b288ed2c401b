"""Keys and values as the pool stores them: how a call's rows are rounded, and how rows are read back.

A call's own rows are rounded first and attended to as rounded, so that an answer does not depend on how a prompt was
cut into calls. int8 rows have one float16 scale per token and head: max|x| / 127, rounded to float16 before codes are
computed from it. Codes are round-half-even(x / scale) within +-127. A token and head that is not finite has a scale of
NaN or infinity, and so does every product with it.

Letters: T tokens in a call, B sequences, N places, C longest context, Q longest query, Hkv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from optimc_passes.dialect.replacement import Replacement

LARGEST_CODE = 127.0


@dataclass(frozen=True)
class Rows:
    """Rows of keys or values as they are stored, [..., Hkv * D], with scales [..., Hkv] if they are codes."""

    stored: ir.Value
    scales: ir.Value | None = None

    def gathered(self, body: Replacement, index: ir.Value) -> Rows:
        """Return the rows at [B, N] places."""
        scales = None if self.scales is None else body.op("Gather", self.scales, index, axis=0)
        return Rows(body.op("Gather", self.stored, index, axis=0), scales)

    def followed_by(self, body: Replacement, others: Rows) -> Rows:
        """Return [B, C, ...] and [B, Q, ...] as [B, C + Q, ...]."""
        stored = body.op("Concat", self.stored, others.stored, axis=1)
        if self.scales is None or others.scales is None:
            return Rows(stored)
        return Rows(stored, body.op("Concat", self.scales, others.scales, axis=1))


@dataclass(frozen=True)
class RowFormat:
    """How a layer's keys, or its values, are stored."""

    pool: ir.DataType
    """float16, bfloat16 or int8."""
    heads: int
    dim: int

    def round(self, body: Replacement, rows: ir.Value) -> Rows:
        """Return rows [T, Hkv * D] float32 as they are stored."""
        if self.pool != ir.DataType.INT8:
            return Rows(body.op("Cast", rows, to=int(self.pool)))
        split = body.op("Reshape", rows, body.ints(-1, self.heads, self.dim))
        largest = body.op("ReduceMax", body.op("Abs", split), body.ints(-1), keepdims=1)
        scales = body.op("Cast", body.op("Div", largest, body.scalar(LARGEST_CODE)), to=int(ir.DataType.FLOAT16))
        exact = body.op("Cast", scales, to=int(ir.DataType.FLOAT))
        # Rows of zeros, or too small for any scale, have codes of 0.
        divisor = body.op("Where", body.op("Greater", exact, body.scalar(0.0)), exact, body.scalar(1.0))
        nearest = body.op("Round", body.op("Div", split, divisor))
        limits = body.scalar(-LARGEST_CODE), body.scalar(LARGEST_CODE)
        codes = body.op("Cast", body.op("Clip", nearest, *limits), to=int(ir.DataType.INT8))
        return Rows(
            body.op("Reshape", codes, body.ints(-1, self.heads * self.dim)),
            body.op("Reshape", scales, body.ints(-1, self.heads)),
        )

    def read(self, body: Replacement, rows: Rows, half: ir.DataType) -> ir.Value:
        """Return rows [B, N, Hkv * D] as numbers: as they lie in the pool, or code * scale."""
        if rows.scales is None:
            return rows.stored
        # bfloat16 would round scales once more: there the product is float32, and attention rounds that.
        to = int(ir.DataType.FLOAT16 if half == ir.DataType.FLOAT16 else ir.DataType.FLOAT)
        split = body.op("Cast", body.op("Reshape", rows.stored, body.ints(0, 0, self.heads, self.dim)), to=to)
        scales = body.op("Cast", body.op("Unsqueeze", rows.scales, body.ints(-1)), to=to)
        return body.op("Reshape", body.op("Mul", split, scales), body.ints(0, 0, self.heads * self.dim))
