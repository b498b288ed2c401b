"""A plan that TensorRT-RTX itself built: the executor finds its way in it, as far as a machine without a GPU goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optimc.errors import PlanTargetError
from optimc.plan import Plan, TargetInfo
from optimc_passes.emit import LoweringOptions
from optimc_passes.emit.tensorrt.lower import lower
from optimc_runtime.executor.load import load_executor
from optimc_runtime.executor.tensorrt.cuda import CudaKernel
from optimc_runtime.executor.tensorrt.requirements import check_plan
from optimc_runtime.executor.tensorrt.row_kernels import KERNELS, choose_kernel

OPTIONS = LoweringOptions(
    block_size=4,
    int8_activations=None,
    activation_scales="group",
    kv_dtype=None,
    max_step_tokens=64,
    max_seqs=8,
    max_seq_len=64,
    flavor="rtx",
)


@pytest.fixture(scope="module")
def plan(tiny_decoder: Any, write_lowered: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    pytest.importorskip("triton", reason="needs the extra rtx")
    lowered = lower(tiny_decoder().graph(), OPTIONS)
    target = TargetInfo(backend="tensorrt", requirements=lowered.requirements)
    return write_lowered(tmp_path_factory.mktemp("real") / "engine.plan", lowered, target=target)


def test_its_program_is_what_the_executor_expects(plan: Plan) -> None:
    program = check_plan(plan)
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_120", "sm_90", "sm_100"):
        for name in KERNELS:
            kernel = choose_kernel(plan, program.kernels, name, architecture)
            image = plan.blob(kernel.tensor)
            assert image[:4] == b"\x7fELF" or image[-1:] == b"\0", "a cubin, or text as the driver wants it"
            loaded = CudaKernel(None, 0, 0, 0, kernel.arguments, 32 * kernel.num_warps, kernel.shared_bytes)  # type: ignore[arg-type]
            assert len(loaded._types) == 7, "five of ours and Triton's two"


def test_a_machine_without_a_gpu_refuses_it_in_one_line(plan: Plan) -> None:
    from cuda.bindings import driver

    try:
        driver.cuInit(0)
        pytest.skip("this machine has a driver")
    except RuntimeError:
        pass
    with pytest.raises(PlanTargetError) as told:
        load_executor(plan)
    assert str(told.value).startswith(f"{plan.path}: built for an NVIDIA GPU, and this machine has no NVIDIA driver; ")
