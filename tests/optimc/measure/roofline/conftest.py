"""A decoder of one layer small enough to count by hand, its plan, and a machine with round figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.measure.machine import Machine
from optimc.measure.roofline.rates import AttentionRate, KernelRate, MachineRates
from optimc.plan import (
    FORMAT_VERSION,
    KvLayer,
    KvLayout,
    Limits,
    Manifest,
    ModelInfo,
    Plan,
    PlanTensor,
    Source,
    TargetInfo,
    TokenIds,
    write_plan,
)
from optimc.plan.cpu_program import (
    Attention,
    CpuProgram,
    Embed,
    FloatBuffer,
    FloatWeight,
    GatherRows,
    IntWeight,
    Linear,
    Norm,
    Quantize,
    QuantizedBuffer,
    Vector,
    View,
)

WIDTH, VOCAB = 48, 40
QKV_BYTES = 2 * (32 * 4 + 32 * 32) + 2 * (32 * 4 + 32 * 16)
"""8 bits, wide scales, no zero points; 64 outputs are 2 panels; 48 features are groups of 32 and 16."""
GATE_BYTES = 4 * (32 * 2 + 32 + 32 * 32 // 2) + 4 * (32 * 2 + 32 + 32 * 16 // 2)
"""4 bits, scales of 2 bytes, zero points; 40 gate rows padded to 64 and 40 up rows are 104, in 4 panels."""
DOWN_BYTES = 2 * 32 * 40 * 2
"""bfloat16; 48 outputs in 2 panels of 32 rows by 40 features."""
HEAD_BYTES = 2 * 32 * WIDTH * 2
"""bfloat16; 40 outputs in 2 panels; the embedding is read from it too."""


def _view(buffer: int, width: int, column: int = 0) -> View:
    return View(buffer=buffer, column=column, width=width)


def tiny_program(window: int = 0, terms: int = 1) -> CpuProgram:
    stream, rounded, qkv, mixed, inner, rows, logits = range(7)
    return CpuProgram(
        max_tokens=64,
        weights={
            "head": FloatWeight(tensor="head", outputs=VOCAB, features=WIDTH, dtype="bfloat16"),
            "norm": Vector(tensor="norm", length=WIDTH),
            "qkv": IntWeight(
                tensor="qkv",
                outputs=64,
                features=WIDTH,
                group=32,
                bits=8,
                zeros=False,
                wide_scales=True,
                zero_point=128,
            ),
            "gate": IntWeight(
                tensor="gate",
                outputs=104,
                features=WIDTH,
                group=32,
                bits=4,
                zeros=True,
                wide_scales=False,
                zero_point=0,
            ),
            "down": FloatWeight(tensor="down", outputs=WIDTH, features=40, dtype="bfloat16"),
        },
        buffers=(
            FloatBuffer(name="stream", rows="tokens", width=WIDTH, offset=0),
            QuantizedBuffer(name="rounded", rows="tokens", features=WIDTH, group=32, terms=terms, offset=1 << 14),
            FloatBuffer(name="qkv", rows="tokens", width=64, offset=1 << 15),
            FloatBuffer(name="mixed", rows="tokens", width=32, offset=1 << 16),
            FloatBuffer(name="inner", rows="tokens", width=40, offset=(1 << 16) + (1 << 14)),
            FloatBuffer(name="rows", rows="logits", width=WIDTH, offset=1 << 17),
            FloatBuffer(name="logits", rows="logits", width=VOCAB, offset=(1 << 17) + (1 << 14)),
        ),
        arena_bytes=1 << 18,
        ops=(
            Embed(name="embed", table="head", scale=1.0, out=_view(stream, WIDTH)),
            Norm(
                name="norm",
                x=_view(stream, WIDTH),
                weight="norm",
                epsilon=1e-5,
                heads=1,
                centred=False,
                quantized=rounded,
            ),
            Linear(name="qkv", quantized=rounded, weight="qkv", out=_view(qkv, 64)),
            Attention(
                name="attention",
                layer=0,
                num_heads=2,
                num_kv_heads=1,
                head_dim=16,
                scale=0.25,
                window=window,
                softcap=0.0,
                q=_view(qkv, 32),
                k=_view(qkv, 16, 32),
                v=_view(qkv, 16, 48),
                out=_view(mixed, 32),
            ),
            Quantize(name="round", x=_view(stream, WIDTH), quantized=rounded),
            Linear(name="gate", quantized=rounded, weight="gate", gate="silu", out=_view(inner, 40)),
            Linear(
                name="down", x=_view(inner, 40), weight="down", residual=_view(stream, WIDTH), out=_view(stream, WIDTH)
            ),
            GatherRows(name="rows", x=_view(stream, WIDTH), out=_view(rows, WIDTH)),
            Linear(name="head", x=_view(rows, WIDTH), weight="head", out=_view(logits, VOCAB)),
        ),
        logits=logits,
    )


@pytest.fixture
def tiny_plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(
        *, window: int = 0, terms: int = 1, kv_dtype: str = "float32", backend: str = "cpu", **limits: int
    ) -> Plan:
        sizes = {"qkv": QKV_BYTES, "gate": GATE_BYTES, "down": DOWN_BYTES, "head": HEAD_BYTES}
        tensors = [PlanTensor.from_bytes(name, bytes(size)) for name, size in sizes.items()]
        tensors += [PlanTensor.from_array("norm", np.ones(WIDTH, np.float32)), PlanTensor.from_bytes("text", b"x" * 99)]
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name="tiny",
            target=TargetInfo(backend=backend),
            model=ModelInfo(architecture="Tiny", vocab_size=VOCAB, hidden_size=WIDTH, num_layers=1),
            limits=Limits(
                **{"max_seq_len": 256, "max_step_tokens": 64, "max_seqs": 8, "kv_memory_bytes": 1 << 20, **limits}
            ),
            kv=KvLayout(block_size=16, dtype=kv_dtype, layers=(KvLayer(num_kv_heads=1, head_dim=16, window=window),)),
            tokens=TokenIds(bos=None, eos=(), pad=None),
            program=tiny_program(window, terms).model_dump(),
            source=Source(
                model="tiny",
                model_hash="",
                recipe={},
                recipe_hash="",
                calibration_hash=None,
                build_key="",
                tools={},
            ),
        )
        path = tmp_path / "tiny.plan"
        write_plan(path, manifest, tensors)
        return Plan.open(path)

    return make


@pytest.fixture
def machine() -> Machine:
    return Machine("CPU", 2, None, "", ("avx2",), 8 << 30, "Linux x86_64")


@pytest.fixture
def make_rates(machine: Machine) -> Callable[..., MachineRates]:
    """Reads 10 GB/s, does 100 G integer and 50 G floating operations a second, whatever the working set; kernels and
    attention take just what these allow, plus what is given."""

    def make(**changes: Any) -> MachineRates:
        byte_s = 1e-10
        # Of a byte of weight with so many elements: reading it, or all its products.
        elements = {
            "int4": 2,
            "int8": 1,
            "int4_exact": 2,
            "int8_exact": 1,
            "float32": 0.25,
            "bfloat16": 0.5,
            "float16": 0.5,
        }
        peaks = {kind: 100e9 if kind in ("int4", "int8") else 50e9 for kind in elements}
        kernels = tuple(
            KernelRate(
                kind,
                0,
                1 << 20,
                tuple((rows, max(byte_s, 2 * per_byte * rows / peaks[kind])) for rows in (1, 2, 4, 8, 16, 32, 64, 256)),
            )
            for kind, per_byte in elements.items()
        )
        given: dict[str, Any] = {
            "bandwidth": ((1 << 20, 10e9),),
            "int8_ops_per_s": 100e9,
            "float_ops_per_s": 50e9,
            "kernels": kernels,
            # 4 operations of an element of a query head and key: 4 / 50e9.
            "attention": {
                dtype: AttentionRate(byte_s, 8e-11, 1e-7, 8e-11) for dtype in ("float32", "bfloat16", "int8", "int4")
            },
            "exchange_s_per_byte": 1e-11,
            "norm_s_per_element": 1e-10,
            "round_s_per_element": 1e-10,
            "round_s_per_group": 1e-9,
            "op_s": 1e-6,
            "linear_op_s": 2e-6,
            "step_s": 1e-4,
            "sequence_s": 1e-5,
            "logits_row_s_per_element": 1e-10,
            "threads": 2,
            "instruction_set": "avx2",
            "machine": machine,
            "measured_at": "2026-01-01T00:00:00+00:00",
            "source": "by hand",
        }
        return MachineRates(**{**given, **changes})

    return make
