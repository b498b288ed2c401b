"""Rows rounded with a static scale: codes of it and nothing else, saturated, whatever the rows hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optimc.errors import PlanCorruptError
from optimc.plan import KvLayer, KvLayout, ModelInfo, PlanTensor, TargetInfo
from optimc_passes.emit import Lowered
from optimc_passes.emit.cpu.pack_int import pack_int
from optimc_runtime import _native
from optimc_runtime.executor.load import load_executor

VOCAB, DIM, MAX_TOKENS, SCALE = 40, 64, 16, np.float32(0.03)
TOKENS = np.arange(10)


def table() -> np.ndarray:
    """[V, D], some elements far beyond 127 scales, some on ties."""
    rows = np.random.default_rng(1).standard_normal((VOCAB, DIM)).astype(np.float32)
    rows[3] *= 100
    rows[4, :8] = SCALE * np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -400], np.float32)
    rows[5] = 0
    return rows


def norm_of(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)


def rounded(rows: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(rows / SCALE), -127, 127) * SCALE


def program(rounding: dict[str, Any], terms: int = 1) -> dict[str, Any]:
    """Embed, attend (for a program needs a layer; nobody reads it), gather, round, and a head that is the identity."""

    def view(buffer: int, width: int = DIM) -> dict[str, int]:
        return {"buffer": buffer, "column": 0, "width": width}

    floats = [("embedded", "tokens"), ("mixed", "tokens"), ("wanted", "logits"), ("logits", "logits")]
    room = MAX_TOKENS * DIM * 4
    buffers: list[dict[str, Any]] = [
        {"kind": "float", "name": name, "rows": rows, "width": DIM, "offset": index * room}
        for index, (name, rows) in enumerate(floats)
    ]
    quantized = {"kind": "quantized", "name": "codes", "rows": "logits", "features": DIM, "group": DIM}
    buffers.append({**quantized, "terms": terms, "offset": 4 * room})
    heads = {"layer": 0, "num_heads": 1, "num_kv_heads": 1, "head_dim": DIM}
    return {
        "max_tokens": MAX_TOKENS,
        "weights": {
            "table": {"kind": "table", "tensor": "table", "rows": VOCAB, "features": DIM, "dtype": "float32"},
            "ones": {"kind": "vector", "tensor": "ones", "length": DIM},
            "head": {
                "kind": "int",
                "tensor": "head",
                "outputs": DIM,
                "features": DIM,
                "group": DIM,
                "bits": 8,
                "zeros": False,
                "wide_scales": False,
                "zero_point": 128,
            },
        },
        "buffers": buffers,
        "arena_bytes": 6 * room,
        "ops": [
            {"op": "embed", "name": "embed", "table": "table", "scale": 1.0, "out": view(0)},
            {"op": "attention", "name": "attend", **heads, "scale": 1.0, "window": 0, "softcap": 0.0}
            | {"q": view(0), "k": view(0), "v": view(0), "out": view(1)},
            {"op": "gather_rows", "name": "gather", "x": view(0), "out": view(2)},
            {"name": "round", "x": view(2), "quantized": 4, **rounding},
            {"op": "linear", "name": "head", "quantized": 4, "weight": "head", "out": view(3)},
        ],
        "logits": 3,
    }


NORM = {"op": "norm", "weight": "ones", "epsilon": 1e-6, "heads": 1, "centred": False}


@pytest.fixture
def load(write_lowered, tmp_path):
    def make(rounding: dict[str, Any], terms: int = 1):
        codes = np.full((DIM, DIM), 128, np.uint8) + np.eye(DIM, dtype=np.uint8)
        scales = np.ones((DIM, 1), np.float32)
        packed = pack_int(codes, scales, None, bits=8, group=DIM, rows=np.arange(DIM), wide=False)
        arrays = {"table": table(), "ones": np.ones(DIM, np.float32), "head": packed}
        tensors = [PlanTensor.from_array(name, array) for name, array in arrays.items()]
        layout = KvLayout(block_size=16, dtype="float32", layers=(KvLayer(num_kv_heads=1, head_dim=DIM, window=0),))
        plan = write_lowered(
            tmp_path / "engine.plan",
            Lowered(program(rounding, terms), tensors, {}, layout),
            target=TargetInfo(backend="cpu"),
            model=ModelInfo(architecture="Tiny", vocab_size=DIM, hidden_size=DIM, num_layers=1),
        )
        return load_executor(plan, threads=1)

    return make


@pytest.mark.parametrize("instruction_set", _native.supported_instruction_sets())
@pytest.mark.parametrize("count", [1, 10])
def test_rows_are_codes_of_the_scale(load, cache_type, monkeypatch, instruction_set, count):
    monkeypatch.setenv("OPTIMC_ISA", instruction_set)
    executor = load({"op": "quantize", "scale": float(SCALE)})
    got = executor.execute(cache_type(2, 16).step([("a", TOKENS[-count:])])).logits
    want = rounded(table()[TOKENS[-count:]])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    executor.close()


def test_a_norm_rounds_its_result_with_it(load, cache_type):
    executor = load({**NORM, "quantized_scale": float(SCALE)})
    got = executor.execute(cache_type(2, 16).step([("a", TOKENS)])).logits
    want = rounded(norm_of(table()[TOKENS]))
    off = np.abs(got - want) > 1e-5
    # The norm's own rounding may push an element over a tie.
    assert off.mean() < 0.01
    assert np.abs(got - want).max() < 1.01 * SCALE
    executor.close()


def test_without_it_every_row_has_its_own(load, cache_type):
    executor = load({"op": "quantize"})
    rows = table()[TOKENS]
    got = executor.execute(cache_type(2, 16).step([("a", TOKENS)])).logits
    assert (np.abs(got - rows) <= np.abs(rows).max(-1, keepdims=True) / 127 * 0.501).all()
    assert np.abs(got - rounded(rows)).max() > 1
    executor.close()


@pytest.mark.parametrize("rounding", [{"op": "quantize"}, NORM])
def test_two_terms_and_a_static_scale_exclude_each_other(load, rounding):
    field = "scale" if rounding["op"] == "quantize" else "quantized_scale"
    with pytest.raises(PlanCorruptError, match=r"operation 'round': a static scale for two terms"):
        load({**rounding, field: 0.5}, terms=2)


@pytest.mark.parametrize("bad", [0.0, -0.5])
def test_a_scale_that_is_none_is_damage(load, bad):
    with pytest.raises(PlanCorruptError, match="scale"):
        load({"op": "quantize", "scale": bad})


def test_the_native_builder_checks_for_itself():
    builder = _native.ProgramBuilder(
        layers=[(1, 8, "float32", "token")], block_size=16, num_blocks=1, capacity=4, arena_bytes=1 << 16
    )
    builder.float_buffer("tokens", 8, 0)
    builder.quantized_buffer("tokens", 8, 8, 1, 1024)
    for bad in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="not positive and finite"):
            builder.quantize((0, 0, 8), quantized=1, permutation=None, scale=float(bad))
