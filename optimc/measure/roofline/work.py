"""What a step of a plan has to do: bytes and operations, counted from the plan alone. No time, no machine.

Letters as in `optimc.plan.cpu_program`: T tokens in the step, R rows that need logits. Two counts of bytes are kept
apart: those a step moves, which cost time, and those it cannot avoid reading from memory, which bound it. What a step
has just written lies in a cache, so activations and the step's own keys and values are in the first only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from optimc.errors import PlanTargetError
from optimc.measure.roofline.rates import KernelKind
from optimc.plan import KvLayout, Plan
from optimc.plan.cpu_program import (
    Attention,
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
    QuantizedBuffer,
    RowsKind,
    Table,
    View,
)
from optimc.plan.program_section import read_program

REPLICATED_ROWS = 4
"""Up to so many rows every thread rounds activations for itself, and nobody waits: the native kReplicatedRows."""
_FLOAT_BYTES = 4
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHT_FIELDS = ("weight", "bias", "frequencies", "permutation")


@dataclass(frozen=True, slots=True)
class StepShape:
    """Who takes part in a step, and with how much."""

    contexts: tuple[int, ...]
    """Of each sequence, tokens in the pool before the step."""
    queries: tuple[int, ...]
    """Of each sequence, tokens in the step."""
    logits_rows: int
    """R."""

    @property
    def rows(self) -> int:
        """T."""
        return sum(self.queries)

    @classmethod
    def decode(cls, batch: int, context: int) -> StepShape:
        """Return the step in which `batch` sequences, each `context` long, get one more token."""
        return cls((context,) * batch, (1,) * batch, batch)

    @classmethod
    def prefill(cls, tokens: int, most: int) -> tuple[StepShape, ...]:
        """Return the steps in which one prompt is computed, at most `most` tokens in each."""
        starts = range(0, tokens, most)
        return tuple(
            cls((start,), (min(most, tokens - start),), 1 if start + most >= tokens else 0) for start in starts
        )


@dataclass(frozen=True, slots=True)
class OpWork:
    """One operation's work in one step."""

    name: str
    kind: KernelKind
    rows: int
    """Rows it computes; 0: it does nothing in this step, and all below is 0."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """Bytes read whatever the number of rows, by plan tensor: a tensor that two operations name is one."""
    table_bytes: int = 0
    """Rows of a table, one per token."""
    kv_read_bytes: int = 0
    """Keys and values attended to, the step's own included."""
    kv_context_bytes: int = 0
    """Those among them that were in the pool before the step."""
    kv_write_bytes: int = 0
    activation_bytes: int = 0
    """Read and written."""
    int8_ops: int = 0
    float_ops: int = 0
    group: int = 0
    """Of integer weights, features that share a scale."""
    terms: int = 1
    """Products with each weight: 2 where activations are rounded in two terms."""
    norm_elements: int = 0
    rounded_elements: int = 0
    """Activations rounded to 8 bits; each term is a rounding."""
    rounded_groups: int = 0
    """Scales those have."""
    is_private: bool = False
    """Whether every thread does all of it for itself, and none waits for the others."""
    kv_dtype: str = ""
    """Of attention, what the cache holds."""
    heads: int = 0
    """Of attention, sequences times key/value heads."""
    alone_elements: int = 0
    """Of attention, query heads x keys x dimensions of sequences that bring one token."""
    alone_bytes: int = 0
    """Keys and values those read."""
    together_elements: int = 0
    """The same of sequences that bring several."""

    @property
    def weight_bytes(self) -> int:
        """Stored bytes of weights: panels, padding, scales and zero points included."""
        return sum(self.weights.values())


COUNTED = ("cpu", "onnxruntime")
"""Targets whose plans say what a step reads, and which run on the processor that is measured."""


def is_counted(plan: Plan) -> bool:
    """Whether the work of a plan's steps can be counted."""
    return plan.manifest.target.backend in COUNTED


@dataclass(frozen=True, slots=True)
class PlanWork:
    """What is needed of a plan to count its steps' work."""

    program: CpuProgram | None
    """None for plans whose target has no program to read: then a step reads all weights and is bound by that alone."""
    tensor_bytes: Mapping[str, int]
    kv_bytes: tuple[float, ...]
    """Of a token in each attention layer's cache: keys, values and scales."""
    kv_dtypes: tuple[str, ...]
    windows: tuple[int, ...]
    """Of each layer's cache; 0: none."""
    max_step_tokens: int

    @classmethod
    def of(cls, plan: Plan) -> PlanWork:
        """Read the program section. Raises PlanCorruptError if it is damaged, PlanTargetError for an unknown target."""
        manifest = plan.manifest
        backend = manifest.target.backend
        program: CpuProgram | None = None
        if backend == "cpu":
            program = read_program(plan, CpuProgram)
            sizes = {weight.tensor: plan.spec(weight.tensor).nbytes for weight in program.weights.values()}
        elif backend == "onnxruntime":
            from optimc_runtime.executor.onnx_program import OnnxProgram

            initializers = read_program(plan, OnnxProgram).initializers.values()
            sizes = {each.tensor: plan.spec(each.tensor).nbytes for each in initializers}
        else:
            raise PlanTargetError(
                f"{plan.path}: built for target {backend}; work is counted for {' and '.join(COUNTED)} only"
            )
        kv = manifest.kv
        indices = range(len(kv.layers))
        return cls(
            program,
            sizes,
            kv_bytes_per_token(kv),
            tuple(kv.dtype_of(index) for index in indices),
            tuple(layer.window for layer in kv.layers),
            manifest.limits.max_step_tokens,
        )

    @property
    def weight_bytes(self) -> int:
        """Of all weights that steps read, tables left out but where a product reads them too."""
        if self.program is None:
            return sum(self.tensor_bytes.values())
        return distinct_bytes(step_work(self, StepShape.decode(1, 0)))


def kv_bytes_per_token(kv: KvLayout) -> tuple[float, ...]:
    """Return the bytes each layer keeps of a token: what the executor allocates, shared out to a block's slots."""
    from optimc_runtime import _native
    from optimc_runtime.executor.cpu_assembly import kv_layers

    layers = kv_layers(kv)
    return tuple(
        _native.kv_block_bytes(layers=layers[index : index + 1], block_size=kv.block_size) / kv.block_size
        for index in range(len(layers))
    )


def step_work(work: PlanWork, shape: StepShape) -> tuple[OpWork, ...]:
    """Return the work of a step's operations, in order."""
    if work.program is None:
        return (_unknown_program(work, shape),)
    counter = _Counter(work, work.program, shape)
    replicable = _replicable(work.program)
    return tuple(counter.count(op, replicable) for op in work.program.ops)


def distinct_bytes(ops: Iterable[OpWork]) -> int:
    """Return the bytes of the weights that operations read, each tensor once."""
    return sum({name: size for op in ops for name, size in op.weights.items()}.values())


def _replicable(program: CpuProgram) -> frozenset[int]:
    """Return the quantized buffers that every thread may have its own copy of: whoever writes them writes no more."""
    shared = {op.quantized for op in program.ops if isinstance(op, Norm) and (op.out is not None or op.sum is not None)}
    return frozenset(
        index for index, each in enumerate(program.buffers) if isinstance(each, QuantizedBuffer) and index not in shared
    )


class _Counter:
    """Counts operations of one program in one step."""

    def __init__(self, work: PlanWork, program: CpuProgram, shape: StepShape) -> None:
        self._work = work
        self._program = program
        self._shape = shape

    def count(self, op: Op, replicable: frozenset[int]) -> OpWork:
        match op:
            case Linear():
                return self._linear(op)
            case Attention():
                return self._attention(op)
            case Embed():
                rows = self._rows(op.out)
                return OpWork(
                    op.name,
                    "light",
                    rows,
                    table_bytes=rows * self._row_bytes(op.table),
                    activation_bytes=self._moved(op),
                )
        rows = self._rows(op.x if isinstance(op, Norm | Quantize) else op.out)
        rounded, groups = self._rounded(op)
        return OpWork(
            op.name,
            "light",
            rows,
            norm_elements=rows * op.x.width if isinstance(op, Norm) else 0,
            rounded_elements=rounded,
            rounded_groups=groups,
            weights=self._weights(op) if rows else {},
            activation_bytes=self._moved(op),
            is_private=isinstance(op, Norm | Quantize) and op.quantized in replicable and rows <= REPLICATED_ROWS,
        )

    def _linear(self, op: Linear) -> OpWork:
        rows = self._rows(op.out)
        weight = self._program.weights[op.weight]
        assert isinstance(weight, IntWeight | FloatWeight)
        if rows == 0:
            return OpWork(op.name, _kind(weight, op), 0)
        products = 2 * weight.outputs * weight.features * rows
        terms = 1
        if op.quantized is not None:
            buffer = self._program.buffers[op.quantized]
            assert isinstance(buffer, QuantizedBuffer)
            terms = buffer.terms
        return OpWork(
            op.name,
            _kind(weight, op),
            rows,
            weights=self._weights(op),
            activation_bytes=self._moved(op),
            int8_ops=0 if op.quantized is None else terms * products,
            float_ops=products if op.quantized is None else 0,
            group=weight.group if isinstance(weight, IntWeight) else 0,
            terms=terms,
        )

    def _attention(self, op: Attention) -> OpWork:
        shape, each = self._shape, self._work.kv_bytes[op.layer]
        wanted = not op.logits_rows_only or shape.logits_rows > 0
        pairs = list(zip(shape.contexts, shape.queries, strict=True))
        read = sum(_keys(context, queries, op.window) for context, queries in pairs) if wanted else 0
        old = sum(min(context, op.window - 1 if op.window else context) for context, _ in pairs) if wanted else 0
        width = op.num_heads * op.head_dim
        visible = {
            alone: sum(_visible(c, q, op.window, op.logits_rows_only) for c, q in pairs if (q == 1) == alone)
            for alone in (True, False)
        }
        if not wanted:
            visible = {True: 0, False: 0}
        return OpWork(
            op.name,
            "attention",
            shape.rows,
            kv_read_bytes=round(read * each),
            kv_context_bytes=round(old * each),
            kv_write_bytes=round(shape.rows * each),
            activation_bytes=self._moved(op),
            float_ops=4 * width * sum(visible.values()),
            kv_dtype=self._work.kv_dtypes[op.layer],
            heads=len(pairs) * op.num_kv_heads,
            alone_elements=width * visible[True],
            alone_bytes=round(sum(_keys(c, q, op.window) for c, q in pairs if q == 1) * each) if wanted else 0,
            together_elements=width * visible[False],
        )

    def _rows(self, view: View) -> int:
        return self._count_rows(self._program.buffers[view.buffer].rows)

    def _count_rows(self, rows: RowsKind) -> int:
        return self._shape.rows if rows == "tokens" else self._shape.logits_rows

    def _weights(self, op: Op) -> dict[str, int]:
        names = [name for field in _WEIGHT_FIELDS if (name := getattr(op, field, None)) is not None]
        names += op.vectors if isinstance(op, Elementwise) else ()
        tensors = [self._program.weights[name].tensor for name in names]
        return {tensor: self._work.tensor_bytes[tensor] for tensor in tensors}

    def _row_bytes(self, table: str) -> int:
        """Return the bytes of one token's row; codes without their scales, which lie in lines of their own."""
        weight = self._program.weights[table]
        assert isinstance(weight, IntWeight | FloatWeight | Table)
        if isinstance(weight, IntWeight):
            return weight.features * weight.bits // 8
        return weight.features * _ITEM_BYTES[weight.dtype]

    def _rounded(self, op: Op) -> tuple[int, int]:
        """Return the activations an operation rounds, and the groups they are in."""
        if not isinstance(op, Norm | Quantize) or op.quantized is None:
            return 0, 0
        buffer = self._program.buffers[op.quantized]
        assert isinstance(buffer, QuantizedBuffer)
        rows = self._count_rows(buffer.rows) * buffer.terms
        return rows * buffer.features, rows * -(-buffer.features // buffer.group)

    def _moved(self, op: Op) -> int:
        """Return the bytes of activations an operation reads and writes."""
        total = 0
        for name in type(op).model_fields:
            value = getattr(op, name)
            views = value if name == "inputs" else (value,)
            total += sum(self._rows(v) * v.width * _FLOAT_BYTES for v in views if isinstance(v, View))
            if name == "quantized" and value is not None:
                buffer = self._program.buffers[value]
                assert not isinstance(buffer, FloatBuffer)
                groups = -(-buffer.features // buffer.group)
                total += self._count_rows(buffer.rows) * buffer.terms * (buffer.features + 8 * groups)
        return total


def _kind(weight: IntWeight | FloatWeight, op: Linear) -> KernelKind:
    if isinstance(weight, FloatWeight):
        return weight.dtype
    kinds: dict[tuple[int, bool], KernelKind] = {
        (4, True): "int4",
        (8, True): "int8",
        (4, False): "int4_exact",
        (8, False): "int8_exact",
    }
    return kinds[weight.bits, op.quantized is not None]


def _keys(context: int, queries: int, window: int) -> int:
    """Return the keys that any of a sequence's queries sees."""
    return min(context + queries, window + queries - 1) if window else context + queries


def _visible(context: int, queries: int, window: int, last_only: bool) -> int:
    """Return the keys that a sequence's queries see, summed over the queries; the last one's alone if asked so."""
    first = context + queries if last_only else context + 1
    last = context + queries
    if not window:
        return (first + last) * (last - first + 1) // 2
    return sum(min(seen, window) for seen in range(first, last + 1))


def _unknown_program(work: PlanWork, shape: StepShape) -> OpWork:
    pairs = [(c, w, each) for c in shape.contexts for w, each in zip(work.windows, work.kv_bytes, strict=True)]
    read = round(sum(min(c, w - 1 if w else c) * each for c, w, each in pairs))
    return OpWork(
        "all weights", "light", shape.rows, weights=work.tensor_bytes, kv_read_bytes=read, kv_context_bytes=read
    )
