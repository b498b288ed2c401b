"""Formats of the KV cache in the cpu executor: what a layer holds is what its format's arithmetic says.

The program looks up queries, keys and values of each token in a table and answers what attention makes of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optimc.errors import PlanCorruptError, PlanTargetError
from optimc.plan import KvLayer, KvLayout, ModelInfo, PlanTensor, TargetInfo
from optimc_passes.dialect import PagedAttention, attend
from optimc_passes.emit import Lowered
from optimc_passes.quantize.kv_ranges import KeyRange, KeyScales, round_by_channel, round_by_token
from optimc_runtime import _native
from optimc_runtime.executor.load import load_executor

VOCAB, KV_HEADS, GROUP, DIM, MAX_TOKENS = 50, 2, 2, 24, 64
SPEC = PagedAttention(0, KV_HEADS * GROUP, KV_HEADS, DIM, scale=0.2)
WIDTH = SPEC.q_width + 2 * SPEC.kv_width
TOKENS = np.random.default_rng(2).integers(0, VOCAB, 40)
KINDS = [(dtype, keys) for dtype in ("int8", "int4") for keys in ("token", "channel")]


def table() -> np.ndarray:
    """Queries, keys and values of every token [V, H D + 2 Hkv D]; keys have channels of very different size."""
    rows = np.random.default_rng(3).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    rows[:, SPEC.q_width : SPEC.q_width + SPEC.kv_width] *= np.geomspace(0.1, 3, SPEC.kv_width, dtype=np.float32)
    return rows


def parts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [T, H D], keys and values [T, Hkv D]."""
    return tuple(np.split(rows, [SPEC.q_width, SPEC.q_width + SPEC.kv_width], axis=1))


def by_head(rows: np.ndarray) -> np.ndarray:
    """[T, Hkv D] as [Hkv, T, D]."""
    return rows.reshape(len(rows), KV_HEADS, DIM).swapaxes(0, 1)


def scales_of(keys: np.ndarray, dtype: str) -> KeyScales:
    seen = KeyRange()
    seen.see(by_head(keys))
    return seen.scales(dtype)


def expected(rows: np.ndarray, dtype: str, by: KeyScales | None) -> np.ndarray:
    """Attention of every token to the tokens up to itself, over a cache of this format."""
    q, k, v = parts(rows)
    heads = by_head(k)
    held = round_by_token(heads, dtype) if by is None else round_by_channel(heads, by, dtype)
    keys = held.swapaxes(0, 1).reshape(k.shape)
    values = round_by_token(by_head(v), dtype).swapaxes(0, 1).reshape(v.shape)
    return attend(SPEC, q.astype(np.float64), keys, values, np.tri(len(q), dtype=bool))


def program() -> dict[str, Any]:
    """Embed, attend, take the rows that are wanted, and a head that is the identity."""
    out = SPEC.q_width
    buffers, offset = [], 0
    for name, rows, width in (
        ("embedded", "tokens", WIDTH),
        ("mixed", "tokens", out),
        ("wanted", "logits", out),
        ("logits", "logits", out),
    ):
        buffers.append({"kind": "float", "name": name, "rows": rows, "width": width, "offset": offset})
        offset += MAX_TOKENS * width * 4

    def view(buffer: int, column: int, width: int) -> dict[str, int]:
        return {"buffer": buffer, "column": column, "width": width}

    attention = {
        "op": "attention",
        "name": "attend",
        "layer": 0,
        "num_heads": SPEC.num_heads,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "scale": SPEC.scale,
        "window": 0,
        "softcap": 0.0,
        "q": view(0, 0, out),
        "k": view(0, out, SPEC.kv_width),
        "v": view(0, out + SPEC.kv_width, SPEC.kv_width),
        "out": view(1, 0, out),
    }
    return {
        "max_tokens": MAX_TOKENS,
        "weights": {
            "table": {"kind": "table", "tensor": "table", "rows": VOCAB, "features": WIDTH, "dtype": "float32"},
            "head": {"kind": "float", "tensor": "head", "outputs": out, "features": out, "dtype": "float32"},
        },
        "buffers": buffers,
        "arena_bytes": offset,
        "ops": [
            {"op": "embed", "name": "embed", "table": "table", "scale": 1.0, "out": view(0, 0, WIDTH)},
            attention,
            {"op": "gather_rows", "name": "gather", "x": view(1, 0, out), "out": view(2, 0, out)},
            {"op": "linear", "name": "head", "x": view(2, 0, out), "weight": "head", "out": view(3, 0, out)},
        ],
        "logits": 3,
    }


@pytest.fixture
def make_plan_of(write_lowered, tmp_path):
    """Write the plan of a cache format and open it; `by` are scales of channels."""

    def make(dtype: str, by: KeyScales | None = None, **facts: Any):
        identity = np.eye(SPEC.q_width, dtype=np.float32).reshape(-1, 32, SPEC.q_width).transpose(0, 2, 1)
        packed = np.ascontiguousarray(identity).view(np.uint8).reshape(-1)
        tensors = [PlanTensor.from_array("table", table()), PlanTensor.from_array("head", packed)]
        if by is not None:
            facts = {"keys": "channel", "provenance": "calibrated", "key_scales": "kv/0/key_scales", **facts}
            tensors.append(PlanTensor.from_array("kv/0/key_scales", by.scales))
            if by.minimums is not None:
                facts["key_minimums"] = "kv/0/key_minimums"
                tensors.append(PlanTensor.from_array("kv/0/key_minimums", by.minimums))
        layer = KvLayer(num_kv_heads=KV_HEADS, head_dim=DIM, window=0, **facts)
        kv = KvLayout(block_size=16, dtype=dtype, layers=(layer,))
        lowered = Lowered(program(), tensors, {}, kv)
        model = ModelInfo(architecture="Tiny", vocab_size=SPEC.q_width, hidden_size=WIDTH, num_layers=1)
        target = TargetInfo(backend="cpu")
        return write_lowered(tmp_path / "engine.plan", lowered, target=target, model=model)

    return make


def answer(plan, cache_type, chunks=(40,)) -> np.ndarray:
    executor = load_executor(plan, threads=1)
    cache, rows, start = cache_type(8, 16), [], 0
    for count in chunks:
        step = cache.step([("a", TOKENS[start : start + count])])
        rows.append(executor.execute(step).logits.copy())
        start += count
    executor.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("instruction_set", _native.supported_instruction_sets())
@pytest.mark.parametrize(("dtype", "keys"), KINDS)
def test_attention_sees_what_the_format_gives_back(make_plan_of, cache_type, monkeypatch, dtype, keys, instruction_set):
    monkeypatch.setenv("OPTIMC_ISA", instruction_set)
    rows = table()[TOKENS]
    by = scales_of(parts(rows)[1], dtype) if keys == "channel" else None
    got = answer(make_plan_of(dtype, by), cache_type)
    # In products of bfloat16 pairs queries and weights are rounded to 8 bits: there only coarse faults show.
    atol = 2e-2 if instruction_set == "avx512_bf16" else 2e-5
    np.testing.assert_allclose(got, expected(rows, dtype, by), atol=atol)
    # The formats can be told apart: what would pass for any of them proves nothing.
    exact = attend(SPEC, *(part.astype(np.float64) for part in parts(rows)), np.tri(len(rows), dtype=bool))
    assert np.abs(got - exact).max() > 1e-3


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_keys_three_times_the_range_read_back_as_its_limit(make_plan_of, cache_type, monkeypatch, dtype):
    # What the cache holds is the same on every set; products of float32 show it to the last digits.
    monkeypatch.setenv("OPTIMC_ISA", "portable")
    rows = table()[TOKENS]
    by = scales_of(parts(rows)[1] / 3, dtype)
    got = answer(make_plan_of(dtype, by), cache_type)
    want = expected(rows, dtype, by)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want - expected(rows, dtype, scales_of(parts(rows)[1], dtype))).max() > 0.05


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_chunks_see_the_same_cache(make_plan_of, cache_type, dtype):
    by = scales_of(parts(table()[TOKENS])[1], dtype)
    whole = answer(make_plan_of(dtype, by), cache_type)
    assert np.array_equal(answer(make_plan_of(dtype, by), cache_type, chunks=(1, 7, 16, 9, 7)), whole)


def test_other_scales_give_other_answers(make_plan_of, cache_type):
    by = scales_of(parts(table()[TOKENS])[1], "int8")
    first = answer(make_plan_of("int8", by), cache_type)
    second = answer(make_plan_of("int8", KeyScales(by.scales * np.float32(20), None)), cache_type)
    assert np.abs(first - second).max() > 1e-2


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_are_none_name_their_channel(make_plan_of, cache_type, bad):
    by = scales_of(parts(table()[TOKENS])[1], "int8")
    by.scales[1, 5] = bad
    with pytest.raises(PlanCorruptError, match=r"key scales of KV layer 0: keys of head 1, channel 5: no usable scale"):
        answer(make_plan_of("int8", by), cache_type)


def test_scales_of_another_shape_are_refused(make_plan_of, cache_type):
    by = scales_of(parts(table()[TOKENS])[1], "int8")
    with pytest.raises(PlanCorruptError, match=r"key scales \[1, 24\], want \[2, 24\]"):
        answer(make_plan_of("int8", KeyScales(by.scales[:1].copy(), None)), cache_type)


def test_a_format_without_kernels_is_refused(make_plan_of, cache_type):
    with pytest.raises(PlanTargetError, match="fp8"):
        answer(make_plan_of("fp8"), cache_type)


def test_a_layout_that_contradicts_itself_is_refused():
    channel = {"keys": "channel", "key_scales": "a", "num_kv_heads": 1, "head_dim": 8, "window": 0}
    for facts, message in (
        (channel | {"dtype": "float32"}, "in a cache of float32"),
        (channel | {"key_scales": None}, "need key_scales"),
        (channel | {"keys": "token"}, "have no key_scales"),
        (channel | {"dtype": "int4"}, "key_minimums"),
        (channel | {"key_minimums": "b"}, "key_minimums"),
    ):
        with pytest.raises(ValueError, match=message):
            KvLayout(block_size=16, dtype="int8", layers=(KvLayer(**facts),))


def block_bytes(*layers: tuple[int, int, str, str]) -> int:
    return _native.kv_block_bytes(layers=list(layers), block_size=16)


def test_bytes_of_a_block_by_hand():
    """16 slots of 3 heads of 64: keys and values, then float32 scales and minimums of each slot."""
    assert block_bytes((3, 64, "float32", "token")) == 3 * 2 * 16 * 64 * 4
    assert block_bytes((3, 64, "int8", "token")) == 3 * (2 * 16 * 64 + 16 * 8)
    assert block_bytes((3, 64, "int8", "channel")) == 3 * (2 * 16 * 64 + 16 * 4)
    assert block_bytes((3, 64, "int4", "token")) == 3 * (2 * 16 * 32 + 16 * 16)
    assert block_bytes((3, 64, "int4", "channel")) == 3 * (2 * 16 * 32 + 16 * 8)
    mixed = [(3, 64, "float32", "token"), (3, 64, "int8", "channel"), (1, 128, "int4", "token")]
    assert block_bytes(*mixed) == sum(block_bytes(layer) for layer in mixed)


def test_a_byte_budget_holds_as_many_blocks_as_their_formats_allow(make_plan_of):
    budget = 1 << 20
    for dtype, by in (
        ("float32", None),
        ("int8", None),
        ("int8", scales_of(parts(table())[1], "int8")),
        ("int4", None),
        ("int4", scales_of(parts(table())[1], "int4")),
    ):
        executor = load_executor(make_plan_of(dtype, by), kv_memory_bytes=budget, threads=1)
        # D 24 takes 24 key rows and values padded to 32 columns.
        bits = {"float32": 32, "int8": 8, "int4": 4}[dtype]
        per_slot = {"float32": 0, "int8": 8, "int4": 16}[dtype] // (1 if by is None else 2)
        assert executor.pool.num_blocks == budget // (KV_HEADS * 16 * ((24 + 32) * bits // 8 + per_slot))
        executor.close()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(1, 8, "float32", "channel")], "without scales"),
        ([(1, 8, "int8", "head")], "no key scales 'head'"),
        ([(1, 8, "int3", "token")], "no KV dtype 'int3'"),
    ],
)
def test_layers_the_native_module_refuses(layers, message):
    with pytest.raises(ValueError, match=message):
        _native.ProgramBuilder(layers=layers, block_size=16, num_blocks=2, capacity=4, arena_bytes=4096)


def test_attention_waits_for_its_layers_scales():
    builder = _native.ProgramBuilder(
        layers=[(1, 8, "int4", "channel")], block_size=16, num_blocks=2, capacity=4, arena_bytes=4096
    )
    builder.float_buffer("tokens", 8, 0)
    view = (0, 0, 8)
    facts = {"layer": 0, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "scale": 1.0, "window": 0, "softcap": 0.0}

    def attention():
        builder.attention(
            **facts, interleaved=False, logits_rows_only=False, rotation=None, q=view, k=view, v=view, out=view
        )

    with pytest.raises(ValueError, match="KV layer 0 has no key scales yet"):
        attention()
    ones = np.ones((1, 8), np.float32)
    with pytest.raises(ValueError, match="keys of 4 bits need minimums"):
        builder.kv_channel_scales(0, ones, None)
    builder.kv_channel_scales(0, ones, ones)
    attention()
    with pytest.raises(ValueError, match="written twice"):
        attention()
