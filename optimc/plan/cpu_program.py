"""The `program` section of a plan for the cpu target: what its lowering writes and its executor runs.

A program is a straight line of operations on float32 buffers, rows of one token each. Buffers lie in one arena at
offsets planned by lifetime. Weights are plan tensors, prepacked for the kernels and used where the file is mapped.

Threads wait for each other after every operation but those that only round (Quantize, and Norm without `out` and
`sum`): in small steps each thread does these for itself. So what such an operation reads must stay until the next
operation that does not only round has ended.

Letters: T tokens in the step, R rows that need logits, C input features, N output features, G quantization group along
C, H query heads, Hkv key/value heads, D head dim, V vocabulary.

Bytes of a weight
- Output features are stored in panels of 32; the last panel is padded with rows that compute to zero. With a gate,
  panels alternate: 32 gate rows, then the 32 up rows of the same outputs; each half is padded to whole panels.
- Floating point: panel after panel, for each feature the elements of the panel's 32 rows.
- Integer codes: panel after panel, group after group; a group is its 32 scales (float16, or float32 if `wide_scales`),
  its 32 zero points (uint8, if `zeros`), then its codes, features padded to a multiple of 8:
  4 bits: for every 8 features 2 blocks of 64 bytes, one per 16 rows, 4 bytes a row: byte j holds the code of feature j
  in its low half and of feature 4 + j in its high half. 8 bits: for every 4 features 2 blocks of 64 bytes, 4 bytes a
  row: byte j holds the code of feature j. w = (code - zero) * scale; without zero points `zero_point` holds for all.
  Scales of padding rows are 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PROGRAM_VERSION: Literal[1] = 1
HEADS_VERSION: Literal[2] = 2
"""Of programs that answer hidden states or have heads, which earlier readers do not know."""
PANEL_ROWS = 32
ALIGNMENT = 64
"""Bytes that buffers in the arena and tensors in the file are aligned to."""

FloatDtype = Literal["float32", "bfloat16", "float16"]
GateKind = Literal["none", "silu", "gelu", "gelu_tanh", "relu", "sigmoid"]
RowsKind = Literal["tokens", "logits"]

UNARY_OPS = (
    *("neg", "abs", "sqrt", "reciprocal", "exp", "log", "sigmoid", "silu", "tanh", "erf", "gelu", "gelu_tanh"),
    *("relu", "softplus", "sin", "cos"),
)
BINARY_OPS = ("add", "sub", "mul", "div", "min", "max", "pow")
MAX_ELEMENTWISE_STEPS = 32


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IntWeight(_Section):
    """A linear weight [N, C] in integer codes."""

    kind: Literal["int"] = "int"
    tensor: str
    """Plan tensor, U8."""
    outputs: int = Field(gt=0)
    """N as stored: with a gate, both halves with the first padded to whole panels."""
    features: int = Field(gt=0)
    group: int = Field(gt=0)
    """G; the last group may be ragged."""
    bits: Literal[4, 8]
    """How codes are stored."""
    zeros: bool
    wide_scales: bool
    zero_point: int = Field(ge=0, le=255)
    """Of every group, without `zeros`."""


class FloatWeight(_Section):
    """A linear weight [N, C] in floating point, in panels."""

    kind: Literal["float"] = "float"
    tensor: str
    """Plan tensor, U8: the packed bytes."""
    outputs: int = Field(gt=0)
    features: int = Field(gt=0)
    dtype: FloatDtype


class Table(_Section):
    """An embedding [V, C], row-major."""

    kind: Literal["table"] = "table"
    tensor: str
    rows: int = Field(gt=0)
    features: int = Field(gt=0)
    dtype: FloatDtype


class Vector(_Section):
    """float32 [length]: norm weights, biases, frequencies. A bias of a linear weight is padded and ordered as its
    panels are."""

    kind: Literal["vector"] = "vector"
    tensor: str
    length: int = Field(gt=0)


class Permutation(_Section):
    """int32 [C]: place j takes feature p[j]."""

    kind: Literal["permutation"] = "permutation"
    tensor: str
    length: int = Field(gt=0)


Weight = Annotated[IntWeight | FloatWeight | Table | Vector | Permutation, Field(discriminator="kind")]


class FloatBuffer(_Section):
    """float32 [T or R, width]."""

    kind: Literal["float"] = "float"
    name: str
    rows: RowsKind
    width: int = Field(gt=0)
    offset: int = Field(ge=0)
    """Bytes from the start of the arena; room for the most rows a step may have."""


class QuantizedBuffer(_Section):
    """Activations in 8 bits: codes int8 [rows, padded C], scales float32 [rows, g], sums int32 [rows, g], one after the
    other, each aligned. Groups are padded as in the weights that read it; g = ceil(C / G).

    A scale is the largest magnitude of its group in its row over 127; or the operation that writes the buffer has a
    static one for all of it, measured at build time, and codes saturate."""

    kind: Literal["quantized"] = "quantized"
    name: str
    rows: RowsKind
    features: int = Field(gt=0)
    group: int = Field(gt=0)
    terms: Literal[1, 2] = 1
    """With 2, as many rows again follow: what rounding the first ones left, rounded itself. A product with such a
    buffer is the sum of the products with both, so that little but float32's own rounding is lost."""
    offset: int = Field(ge=0)


Buffer = Annotated[FloatBuffer | QuantizedBuffer, Field(discriminator="kind")]


class View(_Section):
    """Columns [column, column + width) of a float buffer."""

    buffer: int = Field(ge=0)
    column: int = Field(ge=0)
    width: int = Field(gt=0)


class _Op(_Section):
    name: str
    """Where it comes from in the graph; for listings and messages."""


class Embed(_Op):
    """out[t] = scale * row tokens[t] of the table."""

    op: Literal["embed"] = "embed"
    table: str
    """A Table, or a linear weight [V, C] in panels, which a tied head shares."""
    scale: float
    out: View


class Norm(_Op):
    """out = after + norm(x + before), over each of `heads` equal parts of a row; sum = x + before."""

    op: Literal["norm"] = "norm"
    x: View
    weight: str
    bias: str | None = None
    epsilon: float
    heads: int = Field(gt=0)
    centred: bool
    """LayerNorm, which subtracts the mean; otherwise RMSNorm."""
    before: View | None = None
    after: View | None = None
    sum: View | None = None
    out: View | None = None
    quantized: int | None = None
    """A quantized buffer that receives the result as well, or instead."""
    permutation: str | None = None
    """Order of features in the quantized buffer."""
    quantized_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A static scale of the quantized buffer, which then has one term; None: as its rows ask for."""


class Quantize(_Op):
    """Round rows to 8 bits, one scale per row and group (see QuantizedBuffer)."""

    op: Literal["quantize"] = "quantize"
    x: View
    quantized: int
    permutation: str | None = None
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A static scale, and then the buffer has one term; None: as the rows ask for."""


class Linear(_Op):
    """out = residual + (x W^T + bias), or gate(x Wg^T + bg) * (x Wu^T + bu)."""

    op: Literal["linear"] = "linear"
    x: View | None = None
    """float32 activations; exactly one of `x` and `quantized` is given."""
    quantized: int | None = None
    static_scale: float | None = None
    """While a program is drafted: the static scale `x` is to be rounded with. A finished program has it where the
    rounding is done, in Quantize and Norm."""
    weight: str
    bias: str | None = None
    residual: View | None = None
    gate: GateKind = "none"
    out: View


class Rotation(_Op):
    """out[t] = scale * (cos(position[t] * frequencies), sin(position[t] * frequencies)), in float32."""

    op: Literal["rotation"] = "rotation"
    frequencies: str
    scale: float
    out: View


class Attention(_Op):
    """Rotate q and k, write k and v to the pool, attend to the pool (see dialect `PagedAttention`)."""

    op: Literal["attention"] = "attention"
    layer: int = Field(ge=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    scale: float
    window: int = Field(ge=0)
    softcap: float = Field(ge=0)
    rotation: View | None = None
    """cos and sin of a Rotation, as wide as the dimensions it turns."""
    interleaved: bool = False
    q: View
    k: View
    v: View
    out: View
    logits_rows_only: bool = False
    """Whether nobody reads other rows of `out` than those that need logits; the others may be left as they are."""


class ElementwiseStep(_Section):
    """Value i of an expression: `rows` and `vector` read input `a` or vector `a`, `constant` is `value`, the others
    take the values of steps `a` and, if binary, `b`."""

    op: str
    a: int = 0
    b: int = 0
    value: float = 0.0


class Elementwise(_Op):
    """An expression evaluated for every element; its last step is the result."""

    op: Literal["elementwise"] = "elementwise"
    steps: tuple[ElementwiseStep, ...] = Field(min_length=1, max_length=MAX_ELEMENTWISE_STEPS)
    inputs: tuple[View, ...] = ()
    vectors: tuple[str, ...] = ()
    out: View


class GatherRows(_Op):
    """out[r] = x[logits_rows[r]]: from here on only rows somebody reads are computed."""

    op: Literal["gather_rows"] = "gather_rows"
    x: View
    out: View


class PermuteFeatures(_Op):
    """out[t, j] = x[t, p[j]]."""

    op: Literal["permute"] = "permute"
    x: View
    permutation: str
    out: View


Op = Annotated[
    Embed | Norm | Quantize | Linear | Rotation | Attention | Elementwise | GatherRows | PermuteFeatures,
    Field(discriminator="op"),
]


class CpuHeads(_Section):
    """The Medusa heads: a second list of operations on the same buffers, weights and arena, run between steps.

    It runs with N tokens and N * K logits rows, row n * K + k being head k's for row n. So a "tokens" buffer [N, K * C]
    and a "logits" buffer [N * K, C] at the same offset are the same numbers.
    """

    inputs: tuple[View, ...] = Field(min_length=1)
    """Columns [N, d] that hidden states are copied to before the operations run."""
    logits: int
    """The float buffer [N * K, V'] the candidates are picked from, V' the draft vocabulary."""
    ops: tuple[Op, ...] = Field(min_length=1)


class CpuProgram(_Section):
    """Everything the cpu executor needs besides the tensors."""

    version: Literal[1, 2] = PROGRAM_VERSION
    max_tokens: int = Field(gt=0)
    """Most rows a buffer has room for, T and R."""
    weights: dict[str, Weight]
    buffers: tuple[Buffer, ...]
    arena_bytes: int = Field(gt=0)
    ops: tuple[Op, ...] = Field(min_length=1)
    logits: int
    """The float buffer [R, V] the program leaves its answer in."""
    hidden: View | None = None
    """[R, d] what the output head multiplies, where the program keeps it to the end of a step."""
    heads: CpuHeads | None = None
    """Operations, buffers and weights of the Medusa heads."""

    @model_validator(mode="after")
    def _is_finished(self) -> CpuProgram:
        for op in self.ops:
            if isinstance(op, Linear) and op.static_scale is not None:
                raise ValueError(
                    f"linear '{op.name}' rounds with scale {op.static_scale:g}, which a program leaves to "
                    "the operation before it"
                )
        if (self.version == HEADS_VERSION) != (self.hidden is not None or self.heads is not None):
            raise ValueError(f"version {self.version} does not go with its hidden states and heads")
        return self


def padded(features: int) -> int:
    """Features of a group as stored: a multiple of 8."""
    return -(-features // 8) * 8


def padded_features(features: int, group: int) -> int:
    """Features of a row of groups of `group`, each padded."""
    full, last = divmod(features, group)
    return full * padded(group) + padded(last)
