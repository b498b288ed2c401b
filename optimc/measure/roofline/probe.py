"""Measuring a machine, once: memory and arithmetic with bare loops, kernels with synthetic programs, the engine with an
executor that computes nothing. No constant is fitted to a plan's own result.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from optimc.measure.machine import read_machine
from optimc.measure.roofline.engine_overhead import measure_engine
from optimc.measure.roofline.rates import AttentionRate, KernelKind, KernelRate, MachineRates, envelope
from optimc.measure.roofline.synthetic import (
    MAX_TOKENS,
    Draft,
    LightKind,
    RandomFile,
    attention_draft,
    attention_layout,
    chain_draft,
    light_draft,
    linear_draft,
    weight_bytes,
)
from optimc.measure.roofline.timed_steps import Seconds, executor_of, fill_pool, step_of, time_steps
from optimc.plan import Plan
from optimc.plan.kv_layout import KvDtype
from optimc.progress import Progress, no_progress
from optimc_runtime import _native
from optimc_runtime.executor.cores import usable_cores
from optimc_runtime.executor.cpu_assembly import kv_layers

MIB = 1 << 20
READ_SETS = tuple(MIB << power for power in range(11))
"""Working sets the bandwidth is measured at: 1 MiB to 1 GiB."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
FEW_ROWS = ROWS[:5]
SETS = {4 * MIB: ROWS, 64 * MIB: ROWS, 256 * MIB: FEW_ROWS}
"""Of weights, and the rows measured: within all but the smallest caches, at the edge of the largest, and in memory,
where only few rows take longer for it."""
WIDTH, NARROW = 1024, 256
"""Of weights: where bytes count, and where the time an operation takes to begin does."""
GROUPS: dict[KernelKind, tuple[int, ...]] = {
    "int4": (16, 64),
    "int8": (16, 64),
    "int4_exact": (64,),
    "int8_exact": (64,),
    "float32": (0,),
    "bfloat16": (0,),
    "float16": (0,),
}
KV_DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "int8", "int4")
CONTEXTS = ((64, 128), (4, 2048))
"""(sequences, tokens of each): as many keys, in many heads and in few."""
QUERY_HEADS, KV_HEADS, HEAD_DIM, LAYERS = (4, 16), 4, 64, 4
LIGHT_OPS = 200
"""Norms or roundings by which a program is longer than the one it is compared with."""
CHAIN, CHAIN_ROWS = 24, 128
"""Products and roundings in a row, and the rows they have: enough that threads read what others wrote."""
PEAK_S = 0.4
"""Spent on each bare loop of arithmetic."""
STEP_S = 0.04
"""Spent at least on each step that is timed."""
TURNS, TURN_S = 5, 0.08
"""Comparisons of two programs, and what is spent at least on each side of one."""


@dataclass(frozen=True, slots=True)
class _Light:
    op_s: float
    norm_s_per_element: float
    round_s_per_element: float
    round_s_per_group: float
    exchange_s_per_byte: float


def measure_rates(threads: int | None = None, progress: Progress = no_progress) -> MachineRates:
    """Measure this machine with so many threads, one per core by default. Takes about 20 s and 1.1 GiB of memory."""
    threads = usable_cores() if threads is None else threads
    stages = 4 + len(GROUPS) + len(KV_DTYPES)
    done = 0

    def advance() -> None:
        nonlocal done
        progress(done, stages, "measuring this machine")
        done += 1

    advance()
    bandwidth = _bandwidth(threads)
    advance()
    read_s_per_byte = {size: 1 / best for size, best in envelope(bandwidth)}
    int8_ops, float_ops = _native.probe_int8_ops(threads, PEAK_S), _native.probe_float_ops(threads, PEAK_S)
    with RandomFile.of(max(SETS) + 16 * MIB) as file:
        advance()
        light = _light(file, threads)
        linear_op_s = _linear_op_s(file, threads)
        kernels: list[KernelRate] = []
        for kind, groups in GROUPS.items():
            advance()
            for group in groups:
                for size in SETS:
                    rate, peak = _kernel(file, threads, kind, group, size, linear_op_s, read_s_per_byte[size])
                    kernels.append(rate)
                    bandwidth.append((size, peak.bytes_per_s))
                    if kind in ("int4", "int8"):
                        int8_ops = max(int8_ops, peak.ops_per_s)
                    else:
                        float_ops = max(float_ops, peak.ops_per_s)
        attention: dict[str, AttentionRate] = {}
        for dtype in KV_DTYPES:
            advance()
            attention[dtype] = _attention(file, threads, dtype, light.op_s)
        advance()
        engine = measure_engine(file, threads)
    progress(stages, stages, "measuring this machine")
    return MachineRates(
        bandwidth=envelope(bandwidth),
        int8_ops_per_s=int8_ops,
        float_ops_per_s=float_ops,
        kernels=tuple(kernels),
        attention=attention,
        exchange_s_per_byte=light.exchange_s_per_byte,
        norm_s_per_element=light.norm_s_per_element,
        round_s_per_element=light.round_s_per_element,
        round_s_per_group=light.round_s_per_group,
        op_s=light.op_s,
        linear_op_s=linear_op_s,
        step_s=engine.step_s,
        sequence_s=engine.sequence_s,
        logits_row_s_per_element=engine.logits_row_s_per_element,
        threads=threads,
        instruction_set=_native.default_instruction_set(),
        machine=read_machine(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        source="measured on this machine with synthetic programs",
    )


@dataclass(frozen=True, slots=True)
class _Peak:
    """The best that one kernel did."""

    bytes_per_s: float
    ops_per_s: float


def _bandwidth(threads: int) -> list[tuple[int, float]]:
    words = np.ones(READ_SETS[-1] // 8, np.uint64)
    found = []
    for size in READ_SETS:
        rounds = min(200, max(5, 4 * READ_SETS[-1] // max(size, 64 * MIB)))
        found.append((size, _native.probe_read(words[: size // 8], threads, rounds)))
    return found


def _light(file: RandomFile, threads: int) -> _Light:
    def per_op_s(kind: LightKind, rows: int, width: int, group: int) -> float:
        few, many = (
            _seconds(file, threads, light_draft(kind, width, group, each), (rows,))[0].median
            for each in (1, 1 + LIGHT_OPS)
        )
        return max(0.0, (many - few) / LIGHT_OPS)

    op_s = per_op_s("norm", 8, 32, 32)
    rows, width = 64, WIDTH
    norm_s = max(0.0, per_op_s("norm", rows, width, 64) - op_s) / (rows * width)
    # elements * per_element + groups * per_group, for wide groups and for narrow ones
    wide_s, narrow_s = (max(0.0, per_op_s("round", rows, width, group) - op_s) / (rows * width) for group in (64, 16))
    per_group_s = max(0.0, (narrow_s - wide_s) / (1 / 16 - 1 / 64))
    drafts = [chain_draft(64, WIDTH, CHAIN, linked=linked) for linked in (True, False)]
    exchanged_s = _difference_s(file, threads, drafts, CHAIN_ROWS)
    # A product reads codes and writes floats, a rounding the other way round.
    moved = 2 * CHAIN * CHAIN_ROWS * (4 * WIDTH + WIDTH + 8 * WIDTH // 64)
    return _Light(op_s, norm_s, max(0.0, wide_s - per_group_s / 64), per_group_s, max(0.0, exchanged_s) / moved)


def _linear_op_s(file: RandomFile, threads: int) -> float:
    """The same bytes in many operations and in few: what is left is each operation's own."""
    counts = [16 * MIB // weight_bytes("int4", 64, width) for width in (NARROW, WIDTH)]
    drafts = [linear_draft("int4", 64, width, n)[0] for width, n in zip((NARROW, WIDTH), counts, strict=True)]
    return max(0.0, _difference_s(file, threads, drafts, 1) / (counts[0] - counts[1]))


def _difference_s(file: RandomFile, threads: int, drafts: Sequence[Draft], rows: int) -> float:
    """Return what a step of the first draft takes longer than one of the second: the median of several comparisons, as
    a difference of two long times is lost in what else the machine does."""
    first, second = (file.plan(draft) for draft in drafts)
    differences = [
        _plan_seconds(first, threads, (rows,), TURN_S)[0].median
        - _plan_seconds(second, threads, (rows,), TURN_S)[0].median
        for _ in range(TURNS)
    ]
    return statistics.median(differences)


def _kernel(
    file: RandomFile, threads: int, kind: KernelKind, group: int, size: int, linear_op_s: float, least_s_per_byte: float
) -> tuple[KernelRate, _Peak]:
    """Weights are read no faster than memory ever was: on a busy machine what is subtracted is uncertain."""
    count = max(1, size // weight_bytes(kind, group, WIDTH))
    draft, nbytes = linear_draft(kind, group, WIDTH, count)
    empty, _ = linear_draft(kind, group, WIDTH, 0)
    taken = _seconds(file, threads, draft, SETS[size])
    base = _seconds(file, threads, empty, SETS[size])
    points, peak_bytes, peak_ops = [], 0.0, 0.0
    for rows, seconds, nothing in zip(SETS[size], taken, base, strict=True):
        own_s = seconds.median - nothing.median - count * linear_op_s
        points.append((rows, max(own_s / nbytes, least_s_per_byte)))
        peak_bytes = max(peak_bytes, nbytes / seconds.best)
        peak_ops = max(peak_ops, 2 * count * WIDTH * WIDTH * rows / seconds.best)
    return KernelRate(kind, group, size, tuple(points)), _Peak(peak_bytes, peak_ops)


def _seconds(file: RandomFile, threads: int, draft: Draft, rows: Sequence[int]) -> list[Seconds]:
    return _plan_seconds(file.plan(draft), threads, rows, STEP_S)


def _plan_seconds(plan: Plan, threads: int, rows: Sequence[int], least_s: float) -> list[Seconds]:
    layers = kv_layers(plan.manifest.kv)
    block = _native.kv_block_bytes(layers=layers, block_size=plan.manifest.kv.block_size)
    with executor_of(plan, threads, 64, block) as executor:
        return time_steps(executor, [step_of([0], [count]) for count in rows], least_s)


def _attention(file: RandomFile, threads: int, dtype: KvDtype, op_s: float) -> AttentionRate:
    """Decode steps over as many keys with few and many query heads, in few and many sequences; then a prompt."""
    layout = attention_layout(dtype, KV_HEADS, HEAD_DIM, LAYERS)
    block = _native.kv_block_bytes(layers=kv_layers(layout), block_size=layout.block_size)
    steps = [step_of([context] * sequences, [1] * sequences) for sequences, context in CONTEXTS]
    steps.append(step_of([0], [MAX_TOKENS]))
    blocks = max(int(step.block_table.max()) for step in steps) + 1
    taken: dict[int, list[Seconds]] = {}
    for heads in QUERY_HEADS:
        plan = file.plan(attention_draft(heads, KV_HEADS, HEAD_DIM, LAYERS), layout)
        with executor_of(plan, threads, blocks, block) as executor:
            fill_pool(executor, blocks)
            taken[heads] = time_steps(executor, steps, STEP_S)
    few, many = QUERY_HEADS
    keys = [sequences * (context + 1) for sequences, context in CONTEXTS]
    spread, long = 0, 1
    s_per_element = max(
        0.0, (taken[many][long].median - taken[few][long].median) / ((many - few) * HEAD_DIM * keys[long] * LAYERS)
    )
    per_key_bytes = block / layout.block_size / LAYERS  # of one key and value in one layer

    def rest_s(case: int) -> float:
        return taken[many][case].median - LAYERS * (op_s + many * HEAD_DIM * keys[case] * s_per_element)

    # rest = layers * (heads * s_per_head + keys * bytes * s_per_byte), for both cases
    groups = [sequences * KV_HEADS for sequences, _ in CONTEXTS]
    matrix = np.array([[LAYERS * groups[case], LAYERS * keys[case] * per_key_bytes] for case in (spread, long)])
    s_per_head, s_per_byte = np.linalg.solve(matrix, [rest_s(spread), rest_s(long)])
    visible = MAX_TOKENS * (MAX_TOKENS + 1) // 2
    return AttentionRate(
        s_per_byte=max(0.0, float(s_per_byte)),
        s_per_element=s_per_element,
        s_per_head=max(0.0, float(s_per_head)),
        prefill_s_per_element=max(0.0, (taken[many][2].median - LAYERS * op_s) / (LAYERS * many * HEAD_DIM * visible)),
    )
