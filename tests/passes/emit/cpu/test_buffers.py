"""Buffers share bytes only when that harms nobody, and the check that says so can fail."""

import numpy as np
import pytest

from optimc.plan.cpu_program import ALIGNMENT, CpuProgram
from optimc_passes.emit.cpu.buffers import Lifetime, buffer_bytes, place_buffers
from optimc_passes.emit.cpu.draft import FloatRows, QuantizedRows
from optimc_passes.graph.attach import attach_weights


def test_parts_of_a_quantized_buffer_are_aligned():
    assert buffer_bytes(FloatRows("x", "tokens", 5), max_tokens=3) == ALIGNMENT
    # 3 rows of 2 * 16 + 8 codes, of 3 scales and of 3 sums.
    assert buffer_bytes(QuantizedRows("x", "tokens", features=26, group=12, terms=1), max_tokens=3) == 128 + 64 + 64
    assert buffer_bytes(QuantizedRows("x", "tokens", features=26, group=12, terms=2), max_tokens=3) == 256 + 128 + 128


def test_buffers_that_live_together_do_not_meet():
    rng = np.random.default_rng(4)
    for _ in range(20):
        first = rng.integers(0, 30, 40)
        lives = [
            Lifetime(int(size) * 64, int(start), int(start + length))
            for size, start, length in zip(rng.integers(1, 20, 40), first, rng.integers(0, 8, 40), strict=True)
        ]
        offsets, arena_bytes = place_buffers(lives)
        spans = [(offset, offset + life.nbytes, life) for offset, life in zip(offsets, lives, strict=True)]
        for i, (start, stop, life) in enumerate(spans):
            assert stop <= arena_bytes
            for other_start, other_stop, other in spans[:i]:
                together = life.first <= other.last and other.first <= life.last
                assert not (together and start < other_stop and other_start < stop)


def test_buffers_that_never_live_together_share_bytes():
    assert place_buffers([Lifetime(64, 0, 1), Lifetime(128, 2, 3), Lifetime(64, 3, 4)]) == ([0, 0, 128], 192)


def test_a_gap_is_filled_before_the_arena_grows():
    lives = [Lifetime(256, 0, 9), Lifetime(128, 0, 4), Lifetime(192, 5, 9), Lifetime(64, 0, 4)]
    assert place_buffers(lives) == ([0, 256, 256, 384], 448)


def test_layers_alike_use_the_same_buffers(tiny_decoder, quantized, lowered, interpret):
    counts = {}
    for layers in (2, 6):
        decoder = tiny_decoder(layers=layers)
        linear = {name: quantized(array) for name, array in decoder.arrays.items() if "proj" in name}
        program = lowered(attach_weights(decoder.model, decoder.store.replace(linear))).program
        counts[layers] = len(program["buffers"]), program["arena_bytes"]
    assert counts[2] == counts[6]


def edited(program: CpuProgram, **changed) -> CpuProgram:
    return program.model_copy(update=changed)


@pytest.fixture
def program(tiny_decoder, quantized, lowered, interpret):
    decoder = tiny_decoder()
    linear = {name: quantized(array) for name, array in decoder.arrays.items() if "proj" in name}
    return CpuProgram.model_validate(lowered(attach_weights(decoder.model, decoder.store.replace(linear))).program)


def test_the_check_finds_values_in_one_place(program, interpret):
    assert interpret.memory_faults(program) == []
    together = tuple(buffer.model_copy(update={"offset": 0}) for buffer in program.buffers)
    assert interpret.memory_faults(edited(program, buffers=together))


def test_the_check_finds_a_product_over_what_threads_still_round(program, interpret):
    """Threads do not wait after rounding: the attention's result must outlive the product that reads its codes."""
    place = next(i for i, op in enumerate(program.ops) if op.op == "quantize")
    rounding, product = program.ops[place : place + 2]
    assert product.quantized == rounding.quantized
    over = product.model_copy(update={"out": rounding.x, "residual": None})
    ops = (*program.ops[: place + 1], over, *program.ops[place + 2 :])
    assert interpret.memory_faults(edited(program, ops=ops))
