"""The script for GPU machines, whole, on the fake one: what it would find out there is only in the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.plan import Plan
from optimc_runtime.executor.tensorrt.engine import TensorRtContext

from .fake_attention import FakeCompiler
from .fake_gpu import ILLEGAL, DeviceError, RowKernel

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder()


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch, machine: Any) -> Any:
    """The script, with kernels that the fake GPU has instead of Triton's, and less work for them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check
    from gpu import attention, rows

    compiler = FakeCompiler(machine.kernels, attention.SPEC)
    monkeypatch.setattr(attention, "compile_attention", compiler.attention)
    monkeypatch.setattr(attention, "compile_merge", compiler.merge)
    monkeypatch.setattr(attention, "DECODE", (2, 64))
    monkeypatch.setattr(rows, "TIMED", ((2, 3), (128, 1)))
    return gpu_check


def test_on_a_machine_without_a_gpu_it_says_so_and_exits_2() -> None:
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py")], capture_output=True, text=True, check=False
    )
    if result.returncode != 2:
        pytest.skip("this machine has a GPU")
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpu_check: nothing was checked: this machine has no")


def test_everything_passes_on_a_device_that_works(
    gpu_check: Any, decoder: Any, tensorrt_plan: Callable[..., Plan], make_plan: Callable[..., Plan], machine: Any,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    plan, reference = tensorrt_plan(decoder), make_plan(decoder)
    code = gpu_check.main(["--plan", f"{plan.path}={reference.path}", "--json", str(tmp_path / "found.json")])
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads((tmp_path / "found.json").read_text())
    assert [row for row in document["outcomes"] if row["passed"] is False] == []
    assert (code, document["failed"]) == (0, 0)
    passed = {row["name"] for row in document["outcomes"] if row["passed"]}
    assert passed >= {
        "paged attention, float16 pool, whole",
        "paged attention, int8 pool, split",
        "commit_rows beside NumPy",
        "gather and scatter beside NumPy",
        "load",
        "chunks of 17",
        "chunks of 1",
        "beside 7 mates",
        "several calls in a step",
        "a tree of 5 nodes",
        "decoding upon moved rows",
        "KL to the reference",
        "same likeliest token",
        "greedy tokens behind the reference's",
        "device memory lost by loading again",
        "graphs were captured",
        "logits that graphs change",
    }
    names = [row["name"] for row in document["outcomes"]]
    assert "TPOT, batch 8, context 1" in names
    assert "without graphs: TPOT, batch 1, context 1" in names
    assert "kernels per shape: first step, batch 1" in names
    assert machine.gpu.num_alive == 0


def test_a_device_that_computes_something_else_fails(
    gpu_check: Any, decoder: Any, tensorrt_plan: Callable[..., Plan], make_plan: Callable[..., Plan], tiny_decoder: Any,
    machine: Any, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan, reference = tensorrt_plan(tiny_decoder(seed=5)), make_plan(decoder)
    assert gpu_check.main(["--plan", f"{plan.path}={reference.path}"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = {row["name"] for row in document["outcomes"] if row["passed"] is False}
    assert failed == {"KL to the reference", "same likeliest token", "greedy tokens behind the reference's"}


def test_what_fails_is_a_finding_and_the_rest_is_checked(
    gpu_check: Any, decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(TensorRtContext, "is_capturable", False)
    assert gpu_check.main(["--plan", str(tensorrt_plan(decoder).path), "--plan", "nowhere.plan"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = {(row["subject"], row["name"]): row["found"] for row in document["outcomes"] if row["passed"] is False}
    assert failed == {
        ("engine", "graphs were captured"): "0",
        ("nowhere", "plan"): "nowhere.plan: No such file or directory",
    }
    assert machine.gpu.num_alive == 0


def test_a_gpus_bandwidth_is_found_by_what_the_driver_calls_it(gpu_check: Any) -> None:
    from gpu.timing import bandwidth_of

    assert bandwidth_of("NVIDIA GeForce RTX 4090") == ("RTX 4090", 1008e9)
    assert bandwidth_of("NVIDIA A100-SXM4-40GB") == ("A100 40GB", 1555e9)
    assert bandwidth_of("NVIDIA A100-SXM4-80GB") == ("A100", 2039e9)
    assert bandwidth_of("NVIDIA H100 PCIe") == ("H100 PCIe", 2000e9)
    assert bandwidth_of("NVIDIA H200") == ("H200", 4800e9)
    assert bandwidth_of("NVIDIA L4") == ("L4", 300e9)
    assert bandwidth_of("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert bandwidth_of("Fake GPU") is None


def test_steps_reach_the_whole_of_a_large_pool(gpu_check: Any) -> None:
    from gpu.sequences import Sequences

    from optimc_runtime.executor.base import KvPoolInfo

    blocks = Sequences(KvPoolInfo(10**7, 16, 1)).step([("a", np.zeros(16 << 10, np.int64))]).block_table[0]
    assert len(set(blocks.tolist())) == 1 << 10
    assert blocks.max() > 0.99 * 10**7
    blocks = Sequences(KvPoolInfo(100, 16, 1)).step([("a", np.zeros(1600, np.int64))]).block_table[0]
    assert sorted(blocks.tolist()) == list(range(100))


def test_a_step_that_is_too_fast_or_too_slow_fails(
    gpu_check: Any, decoder: Any, tensorrt_plan: Any, machine: Any
) -> None:
    from gpu.timing import check_decode

    from optimc_runtime.executor.tensorrt.requirements import check_plan

    plan = tensorrt_plan(decoder)
    executor = machine.load(plan)

    def judged(bytes_per_s: float) -> bool | None:
        outcomes = list(check_decode(plan, check_plan(plan), executor, bytes_per_s, [1], 2, steps=8))
        return outcomes[-1].passed

    assert judged(1.0) is False, "no step beats its floor"
    assert judged(1e15) is False, "and none is that far from it"


def test_memory_that_does_not_come_back_fails(
    gpu_check: Any, decoder: Any, tensorrt_plan: Any, machine: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """CUDA keeps something of the first load; only what each load takes again is lost."""
    from gpu.memory import LOST

    from optimc_runtime.executor.tensorrt.executor import TensorRtExecutor

    close = TensorRtExecutor.close
    kept: list[int] = []

    def keep(executor: Any) -> None:
        if executor._unusable != "closed":
            machine.gpu.total_bytes -= kept.pop()
        close(executor)

    monkeypatch.setattr(TensorRtExecutor, "close", keep)
    path = str(tensorrt_plan(decoder).path)

    def failed() -> list[str]:
        code = gpu_check.main(["--plan", path])
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]
        found = [row["name"] for row in rows if row["passed"] is False]
        assert code == bool(found)
        return found

    kept[:] = [0, 0, 0, 0, 2 * LOST]  # popped from the end: the first load keeps it
    assert failed() == []
    kept[:] = [LOST // 2, LOST // 2, LOST // 2, 0, 0]
    assert failed() == ["device memory lost by loading again"]


def test_a_gpu_that_is_lost_on_the_way_is_told_of_in_the_table(
    gpu_check: Any, decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def lose(*arguments: Any) -> None:
        raise DeviceError(ILLEGAL)

    monkeypatch.setattr(RowKernel, "__call__", lose)
    assert gpu_check.main(["--plan", str(tensorrt_plan(decoder).path)]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = [row for row in document["outcomes"] if row["passed"] is False]
    assert [row["name"] for row in failed] == ["commit and move", "bandwidth of commits", "load"]
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in row["found"] for row in failed)
    machine.gpu.memory.clear()  # as the end of the process does
    machine.gpu.handles.clear()
    machine.gpu.retained = 0
