"""Loading an executor: the backend's name in the plan decides."""

from __future__ import annotations

from collections.abc import Callable

from optimc.errors import PlanTargetError
from optimc.plan import Plan
from optimc.registry import Registry
from optimc_runtime.executor import cpu, onnxruntime
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.tensorrt import executor as tensorrt

Loader = Callable[..., Executor]
"""Called with (plan, kv_memory_bytes=..., threads=...)."""


def _registered() -> Registry[Loader]:
    registry: Registry[Loader] = Registry("backend")
    registry.register(cpu.BACKEND, cpu.CpuExecutor)
    registry.register(onnxruntime.BACKEND, onnxruntime.OnnxRuntimeExecutor)
    registry.register(tensorrt.BACKEND, tensorrt.TensorRtExecutor)
    return registry


BACKENDS: Registry[Loader] = _registered()
"""Backend name to executor."""


def load_executor(plan: Plan, *, kv_memory_bytes: int | None = None, threads: int | None = None) -> Executor:
    """Return the executor for the plan's target, ready to run steps.

    `kv_memory_bytes` defaults to the manifest's, `threads` to what suits the machine. Raises PlanTargetError if no
    backend of that name exists here or this machine does not meet its requirements, PlanCorruptError if the program is
    damaged, MissingExtraError if the backend's package is not installed.
    """
    backend = plan.manifest.target.backend
    if backend not in BACKENDS:
        raise PlanTargetError(
            f"{plan.path}: built for '{backend}', this optimc runs: {', '.join(sorted(BACKENDS))}; rebuild the plan"
        )
    return BACKENDS[backend](plan, kv_memory_bytes=kv_memory_bytes, threads=threads)
