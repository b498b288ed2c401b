"""The TensorRT executor: engines on one GPU, with the pool beside them.

A step is cut into calls. For each, its inputs are copied to the device in one piece, the engine reads the pool and
writes the call's new K/V rows, the logits that were asked for are copied back, and `commit_rows` puts the rows into
their slots. All of it is enqueued on one stream and nothing is waited for in between:

- while the device runs a call, the host lays out the next one, and captures graphs of shapes it met for the first time;
- the step ends when its last logits are here: the last call's rows are committed while the host samples.

What is not overlapped: copying one call's inputs with computing the call before, which would need a second stream and
take microseconds off a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.plan import HeadsInfo, Plan
from optimc_runtime.executor.base import DraftCandidates, KvPoolInfo, StepPlan, StepResult
from optimc_runtime.executor.heads import checked_heads
from optimc_runtime.executor.tensorrt.assembly import assemble
from optimc_runtime.executor.tensorrt.calls import CallCosts, split_calls
from optimc_runtime.executor.tensorrt.check_step import check_draft, check_slots, check_step
from optimc_runtime.executor.tensorrt.contexts import GRAPHS_VARIABLE
from optimc_runtime.executor.tensorrt.pool import cache_tensors, context_bytes, count_blocks
from optimc_runtime.executor.tensorrt.requirements import BACKEND, check_plan, open_machine

__all__ = ["BACKEND", "TensorRtExecutor"]

_CLOSED = "closed"


class TensorRtExecutor:
    """Runs steps of a plan lowered for TensorRT, either flavor. See `Executor`.

    The pool lies in device memory: half or int8 with float16 scales, [P * S + 1] rows, the last of them zeros.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        kv_memory_bytes: int | None = None,
        threads: int | None = None,  # noqa: ARG002  for executors that compute on the host
    ) -> None:
        """Check plan and machine, load the engines and allocate the pool.

        `kv_memory_bytes` defaults to the manifest's. Raises PlanTargetError if the plan wants another backend, cache
        type, TensorRT or GPU, or there is none, or it has too little memory; PlanCorruptError if the program is
        damaged or the engine is another; MissingExtraError if TensorRT or cuda-bindings is not installed; EngineError
        naming the call if CUDA or TensorRT fails otherwise.
        """
        program = check_plan(plan)
        manifest, block_size = plan.manifest, plan.manifest.kv.block_size
        self._limits, self._model = manifest.limits, manifest.model
        self._heads_info = checked_heads(plan, has_program=program.heads is not None)
        tensors = cache_tensors(manifest.kv, program.attention)
        bytes_per_block = sum(tensor.row_bytes for tensor in tensors) * block_size
        memory_bytes = manifest.limits.kv_memory_bytes if kv_memory_bytes is None else kv_memory_bytes
        num_blocks = count_blocks(plan.path, memory_bytes, bytes_per_block, block_size)
        self._pool = KvPoolInfo(num_blocks, block_size, bytes_per_block)
        self._profiles = program.model.profiles
        self._costs = CallCosts(plan.spec(program.model.tensor).nbytes, context_bytes(tensors))
        self._unusable = ""
        try:
            self._device, trt = open_machine(plan, program.flavor)
            with ExitStack() as resources:
                resources.callback(self._device.close)
                self._parts = assemble(
                    plan,
                    program,
                    self._device,
                    trt,
                    tensors,
                    self._heads_info,
                    num_blocks=num_blocks,
                    graphs=os.environ.get(GRAPHS_VARIABLE) != "0",
                    resources=resources,
                )
                self._resources = resources.pop_all()
        except EngineError as error:
            raise EngineError(f"{plan.path}: {error}") from error

    @property
    def pool(self) -> KvPoolInfo:
        """The KV pool this executor owns."""
        return self._pool

    @property
    def heads(self) -> HeadsInfo | None:
        """The plan's Medusa heads; None without any."""
        return self._heads_info

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of decode calls captured so far and still kept."""
        return self._parts.runner.num_graphs

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises EngineError if its arrays reach outside the pool, the model or the profiles, or the device fails; then
        no block written by this step may be used.
        """
        parts, count = self._parts, len(plan.logits_rows)
        with self._failures(f"step of {len(plan.tokens)} tokens"):
            check_step(plan, self._pool, self._model.vocab_size, self._limits)
            calls = split_calls(plan, self._profiles, self._costs)
            logits = parts.logits.take(count)
            hidden = None if parts.hidden is None else parts.hidden.take(count)
            for call in calls:
                parts.runner.enqueue(plan, call, parts.logits, parts.hidden)
            parts.runner.wait()
        return StepResult(logits, hidden)

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Copy K/V rows between slots, as if all were read before any is written.

        Raises EngineError if one reaches outside the pool, there are more than a step has tokens, or the device fails.
        """
        with self._failures(f"move of {len(src_slots)} slots"):
            check_slots(src_slots, self._pool)
            check_slots(dst_slots, self._pool)
            if len(src_slots):
                self._parts.runner.move(src_slots, dst_slots)

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:
        """Evaluate the heads for N rows: `hidden` [N, d] as `execute` gave it, `tokens` [N] sampled from them.

        Raises EngineError if there are no heads, the arrays do not fit them, or the device fails.
        """
        with self._failures(f"draft of {top} candidates for {len(tokens)} rows"):
            if self._parts.heads is None or self._heads_info is None:
                raise EngineError("the program has no heads")
            check_draft(hidden, tokens, self._heads_info.hidden_size, self._model.vocab_size)
            return self._parts.heads.draft(hidden, tokens, top)

    def close(self) -> None:
        """Free everything on the device. The executor cannot be used afterwards, the last step's logits can."""
        if self._unusable == _CLOSED:
            return
        lost, self._unusable = self._unusable, _CLOSED
        try:
            self._device.activate()
            self._device.synchronize()
        except EngineError:
            if not lost:
                raise
        finally:
            self._free(lost)

    def _free(self, lost: str) -> None:
        """Close every part. Once the GPU's context is lost CUDA answers every call with the error that lost it, and
        frees all by itself when the process ends."""
        try:
            self._resources.close()
        except EngineError:
            if not lost:
                raise

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Put `what` before an error's words, and find out whether the device still works."""
        assert self._unusable != _CLOSED, "the executor is closed"
        if self._unusable:
            raise EngineError(f"{what}: {self._unusable}")
        try:
            self._device.activate()
            yield
        except EngineError as error:
            self._settle(error)
            raise EngineError(f"{what}: {error}") from error

    def _settle(self, error: EngineError) -> None:
        """Wait until nothing of a failed call runs or copies any more. If CUDA cannot even do that, it never will."""
        try:
            self._device.synchronize()
        except EngineError:
            self._unusable = f"the GPU is lost to this process since '{error}'; restart the server"
