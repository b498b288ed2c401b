"""The cpu executor on a program written by hand: what it answers, and what it refuses in words.

The program looks tokens up, lets them attend to each other with keys and queries of zero, so that every token gets the
mean of the values so far, and adds rows that are wanted to a weight.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.errors import ConfigError, EngineError, PlanCorruptError, PlanTargetError
from optimc.plan import KvLayer, KvLayout, Plan, PlanTensor, TargetInfo
from optimc_passes.emit import Lowered
from optimc_runtime import _native
from optimc_runtime.executor.cpu import CpuExecutor
from optimc_runtime.executor.load import load_executor

VOCAB, DIM, MAX_TOKENS = 50, 16, 64
TOKENS = np.array([3, 1, 4, 1, 5])


def table() -> np.ndarray:
    """Embeddings [V, 2 D]: zeros, which are query and key, and values."""
    rng = np.random.default_rng(3)
    return np.hstack([np.zeros((VOCAB, DIM)), rng.standard_normal((VOCAB, DIM))]).astype(np.float32)


def head() -> np.ndarray:
    """[V, D]"""
    return np.random.default_rng(4).standard_normal((VOCAB, DIM)).astype(np.float32)


def panels(weight: np.ndarray) -> np.ndarray:
    """Pack [V, D] as `cpu_program` describes it: 32 rows a panel, feature after feature."""
    padded = np.zeros((64, DIM), np.float32)
    padded[: len(weight)] = weight
    return np.ascontiguousarray(padded.reshape(2, 32, DIM).transpose(0, 2, 1)).view(np.uint8).reshape(-1)


def program() -> dict[str, Any]:
    offset, buffers = 0, []
    for name, rows, width in [
        ("embedded", "tokens", 2 * DIM),
        ("mean", "tokens", DIM),
        ("wanted", "logits", DIM),
        ("logits", "logits", VOCAB),
    ]:
        buffers.append({"kind": "float", "name": name, "rows": rows, "width": width, "offset": offset})
        offset += MAX_TOKENS * width * 4
    zeros, values = {"buffer": 0, "column": 0, "width": DIM}, {"buffer": 0, "column": DIM, "width": DIM}
    mean, wanted = {"buffer": 1, "column": 0, "width": DIM}, {"buffer": 2, "column": 0, "width": DIM}
    return {
        "max_tokens": MAX_TOKENS,
        "weights": {
            "table": {"kind": "table", "tensor": "table", "rows": VOCAB, "features": 2 * DIM, "dtype": "float32"},
            "head": {"kind": "float", "tensor": "head", "outputs": VOCAB, "features": DIM, "dtype": "float32"},
        },
        "buffers": buffers,
        "arena_bytes": offset,
        "ops": [
            {
                "op": "embed",
                "name": "embed",
                "table": "table",
                "scale": 1.0,
                "out": {"buffer": 0, "column": 0, "width": 2 * DIM},
            },
            {
                "op": "attention",
                "name": "mix",
                "layer": 0,
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": DIM,
                "scale": 1.0,
                "window": 0,
                "softcap": 0.0,
                "q": zeros,
                "k": zeros,
                "v": values,
                "out": mean,
            },
            {"op": "gather_rows", "name": "gather", "x": mean, "out": wanted},
            {
                "op": "linear",
                "name": "head",
                "x": wanted,
                "weight": "head",
                "out": {"buffer": 3, "column": 0, "width": VOCAB},
            },
        ],
        "logits": 3,
    }


@pytest.fixture
def make_cpu_plan(write_lowered: Callable[..., Plan], tmp_path: Any) -> Callable[..., Plan]:
    """Write the program's plan and open it; keyword arguments change the manifest."""

    def make(**changes: Any) -> Plan:
        kv = KvLayout(block_size=4, dtype="float32", layers=(KvLayer(num_kv_heads=1, head_dim=DIM, window=0),))
        tensors = [PlanTensor.from_array("table", table()), PlanTensor.from_array("head", panels(head()))]
        lowered = Lowered(program(), tensors, {}, kv)
        return write_lowered(tmp_path / "engine.plan", lowered, **{"target": TargetInfo(backend="cpu"), **changes})

    return make


def refusal(plan: Plan, kind: type[Exception]) -> str:
    """The message a plan is refused with."""
    with pytest.raises(kind) as caught:
        CpuExecutor(plan, threads=1)
    assert str(plan.path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_gives_the_logits_of_the_rows_that_want_them(
    make_cpu_plan: Callable[..., Plan], cache_type: Any, threads: int
) -> None:
    executor = load_executor(make_cpu_plan(), threads=threads)
    logits = executor.execute(cache_type(8, 4).step([("a", TOKENS)], rows=[1, 4])).logits
    values = table()[TOKENS, DIM:]
    expected = np.stack([values[:2].mean(0), values.mean(0)]) @ head().T
    # float32 rounding of sums of 16 products of about 1.
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    executor.close()


def test_the_pool_is_as_large_as_the_memory_given(make_cpu_plan: Callable[..., Plan]) -> None:
    executor = CpuExecutor(make_cpu_plan(), kv_memory_bytes=1000, threads=1)
    # Four slots of a key and a value of 16 float32.
    assert executor.pool.bytes_per_block == 4 * 2 * DIM * 4
    assert executor.pool.num_blocks == 1


def test_another_backends_plan_is_refused(make_cpu_plan: Callable[..., Plan]) -> None:
    plan = make_cpu_plan(target=TargetInfo(backend="tpu"))
    assert "built for 'tpu', this is the cpu executor" in refusal(plan, PlanTargetError)


def test_requirements_nobody_knows_are_refused_all_at_once(make_cpu_plan: Callable[..., Plan]) -> None:
    plan = make_cpu_plan(target=TargetInfo(backend="cpu", requirements={"moon": "full", "tide": ">=2"}))
    assert "requires moon full, tide >=2, which this optimc cannot check" in refusal(plan, PlanTargetError)


def test_a_cache_type_it_lacks_is_refused_with_those_it_has(make_cpu_plan: Callable[..., Plan]) -> None:
    plan = make_cpu_plan()
    kv = plan.manifest.kv.model_copy(update={"dtype": "fp8"})
    message = refusal(make_cpu_plan(kv=kv), PlanTargetError)
    assert "no KV dtype 'fp8'; use one of float32, bfloat16, int8, int4" in message


def test_an_unknown_instruction_set_is_refused_with_the_known_ones(
    make_cpu_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIMC_ISA", "mmx")
    message = refusal(make_cpu_plan(), PlanTargetError)
    assert "OPTIMC_ISA=mmx: unknown; use portable, avx2, avx512, avx512_bf16 or amx" in message


@pytest.mark.parametrize("instruction_set", _native.supported_instruction_sets())
def test_the_instruction_set_asked_for_runs(
    make_cpu_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, instruction_set: str
) -> None:
    monkeypatch.setenv("OPTIMC_ISA", instruction_set)
    assert CpuExecutor(make_cpu_plan(), threads=1).instruction_set == instruction_set


def test_memory_for_less_than_a_block_is_refused(make_cpu_plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanTargetError, match="511 bytes holds no block; one block of 4 tokens takes 512 bytes"):
        CpuExecutor(make_cpu_plan(), kv_memory_bytes=511)


def _no_operations(changed: dict[str, Any]) -> None:
    del changed["ops"]


def _absent_weight(changed: dict[str, Any]) -> None:
    changed["ops"][3]["weight"] = "absent"


def _short_tensor(changed: dict[str, Any]) -> None:
    changed["weights"]["head"]["outputs"] = 32


def _view_beyond(changed: dict[str, Any]) -> None:
    changed["ops"][1]["v"] = {"buffer": 0, "column": DIM + 1, "width": DIM}


def _buffer_beyond(changed: dict[str, Any]) -> None:
    changed["arena_bytes"] -= 64


def _other_logits(changed: dict[str, Any]) -> None:
    changed["logits"] = 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_no_operations, "(ops: Field required)"),
        (_absent_weight, "(operation 'head': no weight 'absent')"),
        (_short_tensor, "(weight 'head': 4096 bytes, want 2048)"),
        (_view_beyond, "(operation 'mix': columns 17..33 of buffer 0, which has 32)"),
        (_buffer_beyond, "(buffer 'logits': "),
        (_other_logits, "(its logits: 16 wide, the vocabulary has 50)"),
    ],
)
def test_a_damaged_program_is_refused_naming_the_piece(
    make_cpu_plan: Callable[..., Plan], damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    changed = program()
    damage(changed)
    assert f"program section is damaged {said}" in refusal(make_cpu_plan(program=changed), PlanCorruptError)


def test_a_step_that_reaches_outside_is_an_engine_error_and_the_next_one_works(
    make_cpu_plan: Callable[..., Plan], cache_type: Any
) -> None:
    executor = CpuExecutor(make_cpu_plan(), kv_memory_bytes=8 * 512, threads=1)
    with pytest.raises(EngineError, match="step of 2 tokens: token id 50 is not in the vocabulary"):
        executor.execute(cache_type(8, 4).step([("a", np.array([1, VOCAB]))]))
    with pytest.raises(EngineError, match=r"slot \d+ is not in the pool"):
        executor.execute(cache_type(9, 4).step([("a", np.arange(36))]))
    with pytest.raises(EngineError, match="a logits row is not in the step"):
        executor.execute(cache_type(8, 4).step([("a", TOKENS)], rows=[5]))
    assert executor.execute(cache_type(8, 4).step([("a", TOKENS)])).logits.shape == (5, VOCAB)


def test_logits_survive_their_executor(make_cpu_plan: Callable[..., Plan], cache_type: Any) -> None:
    executor = CpuExecutor(make_cpu_plan(), threads=2)
    logits = executor.execute(cache_type(8, 4).step([("a", TOKENS)])).logits
    before = logits.copy()
    executor.close()
    assert np.array_equal(logits, before)


def test_a_closed_executor_refuses_work_and_closes_again(make_cpu_plan: Callable[..., Plan], cache_type: Any) -> None:
    executor = CpuExecutor(make_cpu_plan(), threads=2)
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="step of 5 tokens: the program is closed"):
        executor.execute(cache_type(8, 4).step([("a", TOKENS)]))
    with pytest.raises(EngineError, match="move of 1 slots: the program is closed"):
        executor.move(np.array([0]), np.array([1]))


@pytest.mark.parametrize("threads", [0, -1, 1025, 1.5])
def test_a_number_of_threads_that_is_none_is_the_callers_fault(
    make_cpu_plan: Callable[..., Plan], threads: Any
) -> None:
    with pytest.raises(ConfigError, match="threads: must be an integer from 1 to 1024, got"):
        CpuExecutor(make_cpu_plan(), threads=threads)


def in_a_child(work: Callable[[], None]) -> int:
    """Run `work` after a fork, for 20 s at most; return the child's wait status, 0 when all went well."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_is_told_that_the_threads_are_not_its_own(
    make_cpu_plan: Callable[..., Plan], cache_type: Any
) -> None:
    executor = CpuExecutor(make_cpu_plan(), threads=3)
    step = cache_type(8, 4).step([("a", TOKENS)])
    expected = executor.execute(step).logits.copy()

    def use_and_close() -> None:
        with pytest.raises(EngineError, match="threads stayed in the process that started them"):
            executor.execute(step)
        executor.close()

    assert in_a_child(use_and_close) == 0
    assert np.array_equal(executor.execute(step).logits, expected)
    executor.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * resource.getpagesize()


POOL = 512 << 20
"""Bytes that take a thread some tens of milliseconds."""


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="Linux provides on touch only")
def test_the_pools_memory_is_there_before_anybody_asks(make_cpu_plan: Callable[..., Plan], cache_type: Any) -> None:
    before = resident_bytes()
    executor = CpuExecutor(make_cpu_plan(), kv_memory_bytes=POOL, threads=1)
    step = cache_type(8, 4).step([("a", TOKENS)])
    first = executor.execute(step).logits.copy()  # beside the pool being populated
    deadline_s = time.monotonic() + 20
    while not executor._program.is_pool_populated and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert resident_bytes() - before >= POOL
    assert np.array_equal(executor.execute(step).logits, first)
    executor.close()
    assert resident_bytes() - before < POOL / 2


def test_an_executor_closes_while_its_pool_is_being_populated(make_cpu_plan: Callable[..., Plan]) -> None:
    begun_s = time.monotonic()
    for _ in range(10):
        CpuExecutor(make_cpu_plan(), kv_memory_bytes=POOL, threads=1).close()
    assert time.monotonic() - begun_s < 5  # populating ten pools takes longer only on a machine below 1 GB/s


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_does_not_wait_for_the_thread_that_populates(make_cpu_plan: Callable[..., Plan]) -> None:
    executor = CpuExecutor(make_cpu_plan(), kv_memory_bytes=POOL, threads=1)
    assert in_a_child(executor.close) == 0
    executor.close()


def test_a_pool_that_would_take_what_others_need_comes_as_it_is_used(
    make_cpu_plan: Callable[..., Plan], cache_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimc_runtime.executor.cpu.may_populate", lambda _bytes: False)
    before = resident_bytes()
    executor = CpuExecutor(make_cpu_plan(), kv_memory_bytes=POOL, threads=1)
    executor.execute(cache_type(8, 4).step([("a", TOKENS)]))
    assert not executor._program.is_pool_populated
    assert resident_bytes() - before < POOL / 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_more_threads_than_the_system_starts_are_refused(make_cpu_plan: Callable[..., Plan]) -> None:
    plan = make_cpu_plan()

    def load_in_little_memory() -> None:
        used = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
        room = used + (1 << 30)  # of address space; a thread's stack takes 8 MiB of it
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        with pytest.raises(PlanTargetError, match="1024 threads: .*; ask for fewer"):
            CpuExecutor(plan, kv_memory_bytes=512, threads=1024)
        CpuExecutor(plan, kv_memory_bytes=512, threads=2).close()

    assert in_a_child(load_in_little_memory) == 0
