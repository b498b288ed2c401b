"""A promise of the product, held bit for bit: on the cpu target a token's logits depend on the tokens before it alone.

Not on how a prompt is cut into chunks, not on batch mates, not on which blocks of the pool a sequence got, not on the
number of threads. Prefix-cache hits and preemptions are chunkings and block tables like any other to the executor; the
whole engine is put through them in test_concurrency.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from optimc.plan import Plan
from optimc_runtime import _native
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.executor.load import load_executor

LENGTHS = (70, 41, 1, 64, 17)
"""Tokens of the sequences: more and fewer than a block, a chunk of keys and a row tile."""

MAX_STEP_TOKENS = 64
"""No step has more."""

NUM_TOKEN_IDS = 380
"""The vocabulary is a little larger."""

Schedule = Iterator[list[tuple[int, int]]]
"""Steps: which sequence gets how many more tokens."""

INT4 = {"rtn": {"bits": 4, "group_size": 32, "symmetric": True}}
HEAD8 = {"rtn": {"bits": 8, "group_size": 32, "symmetric": True, "only": ["lm_head"], "ignore": []}}
ASYMMETRIC = {"rtn": {"bits": 4, "group_size": 48, "symmetric": False, "ragged": "ragged"}}
FUSIONS = ["fuse"]
CALIBRATED = {"calibration": {"samples": 2, "seq_len": 64}}
PLANS = {
    "float32": {"passes": FUSIONS},
    "int4": {"passes": [INT4, HEAD8, *FUSIONS]},
    "int4 ragged, unfused, int8 pool": {"passes": [ASYMMETRIC], "kv_dtype": "int8"},
    "int4, exact activations, bfloat16 pool": {
        "passes": [INT4, *FUSIONS],
        "int8_activations": False,
        "kv_dtype": "bfloat16",
    },
    "int4 pool": {"passes": FUSIONS, "kv_dtype": "int4"},
    "int8 pool, keys per channel": {"passes": [{"kv_quant": {"keys": "channel"}}, *FUSIONS], **CALIBRATED},
    "int4 pool, keys per channel": {
        "passes": [{"kv_quant": {"dtype": "int4", "keys": "channel"}}, *FUSIONS],
        **CALIBRATED,
    },
    "layers of different pools": {
        "passes": [INT4, {"kv_quant": {"dtype": "int4", "keys": "channel", "skip_layers": [1]}}, *FUSIONS],
        **CALIBRATED,
    },
}


@dataclass
class _Sequence:
    tokens: NDArray[np.int64]
    blocks: list[int] = field(default_factory=list)
    done: int = 0


@pytest.fixture(scope="module", params=list(PLANS))
def plan_path(request: pytest.FixtureRequest, build: Callable) -> Path:
    target = {"backend": "cpu"}
    changes = dict(PLANS[request.param])
    for key in ("kv_dtype", "int8_activations"):
        if key in changes:
            target[key] = changes.pop(key)
    name = "invariance-" + "".join(c for c in request.param if c.isalnum())
    return build(name, target=target, **changes).path


@pytest.fixture(scope="module")
def sequences() -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, NUM_TOKEN_IDS, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(plan_path: Path, sequences: list[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """Logits of every token, each sequence on its own, one token a step, one thread."""
    with _load(plan_path, threads=1) as executor:
        schedule = ([(b, 1)] for b, length in enumerate(LENGTHS) for _ in range(length))
        return _run(executor, sequences, schedule)


def whole_prompts() -> Schedule:
    """Each sequence in one step of its own, or two if it is longer than a step may be."""
    for b, length in enumerate(LENGTHS):
        for start in range(0, length, MAX_STEP_TOKENS):
            yield [(b, min(MAX_STEP_TOKENS, length - start))]


def together() -> Schedule:
    """All sequences in every step, one token each: a batch of decodes."""
    for position in range(max(LENGTHS)):
        yield [(b, 1) for b, length in enumerate(LENGTHS) if position < length]


def uneven_chunks() -> Schedule:
    """Chunks of any size of some of the sequences in any order."""
    rng = np.random.default_rng(9)
    left = list(LENGTHS)
    while any(left):
        room, step = MAX_STEP_TOKENS, []
        for b in rng.permutation(len(left)):
            take = min(int(rng.integers(0, 24)), left[b], room)
            if take:
                step.append((int(b), take))
                left[b] -= take
                room -= take
        if step:
            yield step


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("schedule", [whole_prompts, together, uneven_chunks])
def test_chunks_batch_mates_blocks_and_threads_change_no_bit(plan_path, sequences, alone, schedule, threads):
    with _load(plan_path, threads=threads) as executor:
        logits = _run(executor, sequences, schedule(), shuffle=np.random.default_rng(threads))
    for b, expected in enumerate(alone):
        assert np.array_equal(logits[b], expected), f"sequence {b}"


@pytest.mark.parametrize("instruction_set", _native.supported_instruction_sets())
def test_chunks_and_threads_change_no_bit_on_any_instruction_set(plan_path, sequences, monkeypatch, instruction_set):
    monkeypatch.setenv("OPTIMC_ISA", instruction_set)
    with _load(plan_path, threads=2) as executor:
        assert executor.instruction_set == instruction_set
        first = _run(executor, sequences, together())
    with _load(plan_path, threads=1) as executor:
        second = _run(executor, sequences, uneven_chunks())
    for b in range(len(LENGTHS)):
        assert np.array_equal(first[b], second[b]), f"sequence {b}"


def test_a_moved_sequence_goes_on_as_if_nothing_had_happened(plan_path, sequences, alone):
    tokens = sequences[0]
    with _load(plan_path, threads=2) as executor:
        size = executor.pool.block_size
        home = _Sequence(tokens, blocks=list(range(5)))
        _step(executor, [(home, 33)])
        slots = np.arange(33)
        executor.move(slots, slots + 5 * size)
        home.blocks = list(range(5, 10))
        logits = _step(executor, [(home, 37)])
    assert np.array_equal(logits, alone[0][33:70])


def test_a_token_verified_in_a_tree_gets_the_bits_it_gets_in_a_row(plan_path, sequences, alone):
    """Two branches after 30 tokens: the true continuation, and other tokens between its nodes."""
    tokens = sequences[0]
    parents = [-1, -1, 0, 1, 2, 4]  # of nodes 0..5; the true ones are 0, 2, 4, 5
    truth = [0, 2, 4, 5]
    nodes = (tokens[30:36] + 1) % NUM_TOKEN_IDS
    nodes[truth] = tokens[30:34]
    depth, mask = [], np.zeros((len(parents), len(parents)), bool)
    for node, parent in enumerate(parents):
        mask[node, node] = True
        if parent >= 0:
            mask[node] |= mask[parent]
        depth.append(0 if parent < 0 else depth[parent] + 1)
    with _load(plan_path, threads=2) as executor:
        sequence = _Sequence(tokens, blocks=[3, 1, 2])
        _step(executor, [(sequence, 30)])
        size = executor.pool.block_size
        index = np.arange(30, 30 + len(parents))
        plan = StepPlan(
            tokens=nodes,
            positions=30 + np.array(depth),
            slots=np.array(sequence.blocks)[index // size] * size + index % size,
            query_start=np.array([0, len(parents)], np.int32),
            context_len=np.array([30], np.int32),
            block_table=np.array([sequence.blocks], np.int32),
            logits_rows=np.arange(len(parents)),
            tree_mask=mask,
        )
        verified = executor.execute(plan).logits[truth].copy()
        # Accepted: the true branch moves to where a plain decode would have put it.
        slots = plan.slots
        executor.move(slots[truth], slots[: len(truth)])
        sequence.done = 34
        following = _step(executor, [(sequence, 6)])
    assert np.array_equal(verified, alone[0][30:34])
    assert np.array_equal(following, alone[0][34:40])


def _load(path: Path, threads: int) -> AbstractContextManager[Executor]:
    return closing(load_executor(Plan.open(path), threads=threads))


def _run(
    executor: Executor,
    tokens: Sequence[NDArray[np.int64]],
    schedule: Schedule,
    shuffle: np.random.Generator | None = None,
) -> list[NDArray[np.float32]]:
    """Run all sequences through the schedule; return the logits [length, V] of each.

    Blocks come in order, or in the order `shuffle` gives.
    """
    order = list(range(executor.pool.num_blocks))
    if shuffle is not None:
        shuffle.shuffle(order)
    sequences = [_Sequence(ids) for ids in tokens]
    logits: list[list[NDArray[np.float32]]] = [[] for _ in tokens]
    for work in schedule:
        for b, count in work:
            sequence = sequences[b]
            while len(sequence.blocks) * executor.pool.block_size < sequence.done + count:
                sequence.blocks.append(order.pop())
        rows = _step(executor, [(sequences[b], count) for b, count in work])
        end = 0
        for b, count in work:
            start, end = end, end + count
            logits[b].append(rows[start:end])
    assert [sequence.done for sequence in sequences] == [len(ids) for ids in tokens]
    return [np.concatenate(parts) for parts in logits]


def _step(executor: Executor, work: list[tuple[_Sequence, int]]) -> NDArray[np.float32]:
    """Run one step of so many more tokens of each sequence; return a copy of the logits of all of them."""
    size = executor.pool.block_size
    positions = [np.arange(sequence.done, sequence.done + count) for sequence, count in work]
    slots = [
        np.array(sequence.blocks)[position // size] * size + position % size
        for (sequence, _), position in zip(work, positions, strict=True)
    ]
    table = np.zeros((len(work), max(len(sequence.blocks) for sequence, _ in work)), np.int32)
    for row, (sequence, _) in zip(table, work, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    counts = [count for _, count in work]
    plan = StepPlan(
        tokens=np.concatenate([sequence.tokens[sequence.done : sequence.done + count] for sequence, count in work]),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_len=np.array([sequence.done for sequence, _ in work], np.int32),
        block_table=table,
        logits_rows=np.arange(sum(counts)),
    )
    logits = executor.execute(plan).logits.copy()
    for sequence, count in work:
        sequence.done += count
    return logits
