"""Programs made to be timed: one kind of operation over and over on random weights, run by the real executor.

Weights are slices of one file of random bytes, mapped as a plan is. The bytes keep to a range in which every float16,
bfloat16 and float32 is finite and normal, as the values would otherwise change how long products take.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from optimc.measure.roofline.rates import KernelKind
from optimc.plan import (
    FORMAT_VERSION,
    KvLayer,
    KvLayout,
    Limits,
    Manifest,
    ModelInfo,
    Plan,
    Source,
    TargetInfo,
    TokenIds,
)
from optimc.plan.container import TensorSpec
from optimc.plan.cpu_program import (
    Attention,
    Buffer,
    CpuProgram,
    Embed,
    FloatBuffer,
    FloatDtype,
    FloatWeight,
    GatherRows,
    IntWeight,
    Linear,
    Norm,
    Op,
    Quantize,
    QuantizedBuffer,
    RowsKind,
    Table,
    Vector,
    View,
    Weight,
)
from optimc.plan.kv_layout import KvDtype

MAX_TOKENS = 256
VOCAB = 32
BLOCK_SIZE = 16
_RANDOM_BYTES = (0x20, 0x3C)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RandomFile:
    """Random bytes on disk, and plans whose tensors are slices of them."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data

    @classmethod
    @contextmanager
    def of(cls, size: int) -> Iterator[RandomFile]:
        """Write `size` bytes to a temporary file, which is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="optimc-probe-") as folder:
            path = Path(folder) / "random"
            random = np.random.default_rng(0).integers(*_RANDOM_BYTES, 1 << 20, np.uint8).tobytes()
            with path.open("wb") as file:
                for _ in range(-(-size // len(random))):
                    file.write(random)
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            yield cls(path, data)

    def plan(self, draft: Draft, kv: KvLayout | None = None) -> Plan:
        """Return a plan that runs the draft."""
        program = draft.program()
        specs = {name: TensorSpec(name, dtype, shape, offset) for name, dtype, shape, offset in draft.tensors}
        manifest = synthetic_manifest(program.model_dump(), kv or attention_layout("float32", 1, 16, 1), VOCAB)
        return Plan(self._path, manifest, specs, self._data)


class Draft:
    """A program being put together: `x` [T, width] holds an embedding that whatever is added reads."""

    def __init__(self, width: int) -> None:
        self.ops: list[Op] = []
        self.weights: dict[str, Weight] = {}
        self.tensors: list[tuple[str, str, tuple[int, ...], int]] = []
        self._buffers: list[Buffer] = []
        self._arena = 0
        self._end = 0
        table = self.add_tensor("table", VOCAB * width * 4)
        self.weights["table"] = Table(tensor=table, rows=VOCAB, features=width, dtype="float32")
        self.x = self.float_buffer(width)
        self.ops.append(Embed(name="x", table="table", scale=1.0, out=self.x))

    def add_tensor(self, name: str, nbytes: int, dtype: str = "U8", *, at: int | None = None) -> str:
        """Take the next bytes of the file, or those at `at`, for a tensor."""
        count = nbytes if dtype == "U8" else nbytes // 4
        offset = self._end if at is None else at
        self.tensors.append((name, dtype, (count,), offset))
        self._end = max(self._end, offset + -(-nbytes // 64) * 64)
        return name

    def float_buffer(self, width: int, rows: RowsKind = "tokens") -> View:
        """Add float32 [rows, width]."""
        name = f"b{len(self._buffers)}"
        self._buffers.append(FloatBuffer(name=name, rows=rows, width=width, offset=self._arena))
        self._arena += -(-MAX_TOKENS * width * 4 // 64) * 64
        return View(buffer=len(self._buffers) - 1, column=0, width=width)

    def quantized_buffer(self, features: int, group: int) -> int:
        """Add activations in 8 bits, one term."""
        name = f"b{len(self._buffers)}"
        self._buffers.append(
            QuantizedBuffer(name=name, rows="tokens", features=features, group=group, offset=self._arena)
        )
        groups = -(-features // group)
        codes, scales = MAX_TOKENS * groups * -(-group // 8) * 8, MAX_TOKENS * groups * 4
        self._arena += -(-codes // 64) * 64 + 2 * (-(-scales // 64) * 64)
        return len(self._buffers) - 1

    def program(self) -> CpuProgram:
        """Return the program: the first columns of `x` are its logits."""
        logits = self.float_buffer(VOCAB, "logits")
        first = self.x.model_copy(update={"width": VOCAB})
        ops = (*self.ops, GatherRows(name="logits", x=first, out=logits))
        return CpuProgram(
            max_tokens=MAX_TOKENS,
            weights=self.weights,
            buffers=tuple(self._buffers),
            arena_bytes=self._arena,
            ops=ops,
            logits=logits.buffer,
        )


def linear_draft(kind: KernelKind, group: int, width: int, count: int) -> tuple[Draft, int]:
    """Return `count` products of `x` [T, width] with weights [width, width] of their own, and their bytes together."""
    draft = Draft(width)
    out = draft.float_buffer(width)
    quantized = None
    if kind in ("int4", "int8"):
        quantized = draft.quantized_buffer(width, group)
        draft.ops.append(Quantize(name="round", x=draft.x, quantized=quantized))
    total = 0
    for index in range(count):
        name = f"w{index}"
        weight, nbytes = _weight(name, kind, group, width)
        draft.add_tensor(name, nbytes)
        draft.weights[name] = weight
        x = draft.x if quantized is None else None
        draft.ops.append(Linear(name=name, x=x, quantized=quantized, weight=name, out=out))
        total += nbytes
    return draft, total


def weight_bytes(kind: KernelKind, group: int, width: int) -> int:
    """Return the stored bytes of a weight [width, width]."""
    return _weight("w", kind, group, width)[1]


LightKind = Literal["norm", "round"]


def light_draft(kind: LightKind, width: int, group: int, count: int) -> Draft:
    """Return `count` norms or roundings to 8 bits of `x` [T, width]."""
    draft = Draft(width)
    out = draft.float_buffer(width)
    draft.add_tensor("norm", 4 * width, "F32")
    draft.weights["norm"] = Vector(tensor="norm", length=width)
    quantized = draft.quantized_buffer(width, group)
    for index in range(count):
        name = f"op{index}"
        if kind == "round":
            draft.ops.append(Quantize(name=name, x=draft.x, quantized=quantized))
        else:
            draft.ops.append(Norm(name=name, x=draft.x, weight="norm", epsilon=1e-5, heads=1, centred=False, out=out))
    return draft


def chain_draft(group: int, width: int, count: int, *, linked: bool) -> Draft:
    """Return `count` times a product with a 4-bit weight [width, width] and a rounding: of what the product left, so
    that each reads what other threads have written, or, not `linked`, of `x`, which stays where it is."""
    draft = Draft(width)
    out = draft.float_buffer(width)
    own = draft.quantized_buffer(width, group)
    read = own if linked else draft.quantized_buffer(width, group)
    weight, nbytes = _weight("w", "int4", group, width)
    draft.add_tensor("w", nbytes)
    draft.weights["w"] = weight
    draft.ops.append(Quantize(name="round", x=draft.x, quantized=read))
    for index in range(count):
        draft.ops.append(Linear(name=f"w{index}", quantized=read, weight="w", out=out))
        draft.ops.append(Quantize(name=f"r{index}", x=out if linked else draft.x, quantized=own))
    return draft


def attention_draft(num_heads: int, num_kv_heads: int, head_dim: int, layers: int) -> Draft:
    """Return one attention per layer, all of the same queries, keys and values."""
    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    draft = Draft(q_width + 2 * kv_width)
    out = draft.float_buffer(q_width)
    q, k, v = (
        draft.x.model_copy(update={"column": column, "width": width})
        for column, width in ((0, q_width), (q_width, kv_width), (q_width + kv_width, kv_width))
    )
    for layer in range(layers):
        draft.ops.append(
            Attention(
                name=f"a{layer}",
                layer=layer,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=1 / math.sqrt(head_dim),
                window=0,
                softcap=0.0,
                q=q,
                k=k,
                v=v,
                out=out,
            )
        )
    return draft


def attention_layout(dtype: KvDtype, num_kv_heads: int, head_dim: int, layers: int) -> KvLayout:
    """Return a cache for `attention_draft`."""
    layer = KvLayer(num_kv_heads=num_kv_heads, head_dim=head_dim, window=0)
    return KvLayout(block_size=BLOCK_SIZE, dtype=dtype, layers=(layer,) * layers)


def synthetic_manifest(
    program: dict[str, object], kv: KvLayout, vocab_size: int, *, max_seqs: int = 64, max_seq_len: int = 4096
) -> Manifest:
    """Return the manifest of a plan nobody built."""
    return Manifest(
        format_version=FORMAT_VERSION,
        name="synthetic",
        target=TargetInfo(backend="cpu"),
        model=ModelInfo(architecture="Synthetic", vocab_size=vocab_size, hidden_size=16, num_layers=len(kv.layers)),
        limits=Limits(max_seq_len=max_seq_len, max_step_tokens=MAX_TOKENS, max_seqs=max_seqs, kv_memory_bytes=1 << 20),
        kv=kv,
        tokens=TokenIds(bos=None, eos=(), pad=None),
        program=program,
        source=Source(
            model="synthetic",
            model_hash="",
            recipe={},
            recipe_hash="",
            calibration_hash=None,
            build_key="",
            tools={},
        ),
    )


def blocks_of(tokens: Sequence[int]) -> list[int]:
    """Return the blocks that sequences of so many tokens take."""
    return [-(-count // BLOCK_SIZE) for count in tokens]


def _weight(name: str, kind: KernelKind, group: int, width: int) -> tuple[Weight, int]:
    panels = -(-width // 32)
    if kind in ("float32", "bfloat16", "float16"):
        dtype: FloatDtype = kind
        return FloatWeight(tensor=name, outputs=width, features=width, dtype=dtype), panels * 32 * width * _ITEM_BYTES[
            kind
        ]
    bits = 4 if kind.startswith("int4") else 8
    weight = IntWeight(
        tensor=name,
        outputs=width,
        features=width,
        group=group,
        bits=4 if bits == 4 else 8,
        zeros=bits == 4,
        wide_scales=False,
        zero_point=0 if bits == 4 else 128,
    )
    groups = width // group
    header = 32 * 2 + (32 if bits == 4 else 0)
    return weight, panels * groups * (header + 32 * group * bits // 8)
