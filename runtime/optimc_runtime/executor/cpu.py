"""The cpu executor: runs a program of fused kernels on weights that stay where the plan file is mapped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc.errors import ConfigError, EngineError, Fault, PlanTargetError
from optimc.plan import HeadsInfo, Plan
from optimc.plan.cpu_program import CpuProgram
from optimc.plan.program_section import read_program
from optimc_runtime import _native
from optimc_runtime.executor.base import DraftCandidates, KvPoolInfo, StepPlan, StepResult
from optimc_runtime.executor.cores import usable_cores
from optimc_runtime.executor.cpu_assembly import assemble, kv_layers
from optimc_runtime.executor.heads import checked_heads, draft_vocab
from optimc_runtime.executor.pool_memory import check_pool_memory, may_populate

BACKEND = "cpu"
MAX_THREADS = 1024
"""What the native program takes."""


class CpuExecutor:
    """Runs steps of a plan lowered for the cpu target. See `Executor`.

    The environment variable OPTIMC_ISA forces an instruction set: portable, avx2, avx512, avx512_bf16 or amx.
    """

    def __init__(self, plan: Plan, *, kv_memory_bytes: int | None = None, threads: int | None = None) -> None:
        """Check the plan, allocate the pool and start the threads.

        `kv_memory_bytes` defaults to the manifest's, `threads` to one per physical core. Raises PlanTargetError if the
        plan wants another backend or a cache type this one lacks, the memory does not hold one block or exceeds the
        machine's, the system does not start that many threads, or OPTIMC_ISA names a set this machine lacks;
        PlanCorruptError if its program is damaged; ConfigError for a number of threads that is none.
        """
        threads = usable_cores() if threads is None else threads
        if not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
            fault = Fault("threads", f"must be an integer from 1 to {MAX_THREADS}, got {threads!r}")
            raise ConfigError("engine options", [fault])
        manifest = plan.manifest
        if manifest.target.backend != BACKEND:
            raise PlanTargetError(f"{plan.path}: built for '{manifest.target.backend}', this is the {BACKEND} executor")
        if manifest.target.requirements:
            unknown = ", ".join(f"{name} {wanted}" for name, wanted in manifest.target.requirements.items())
            raise PlanTargetError(f"{plan.path}: requires {unknown}, which this optimc cannot check; update it")
        program = read_program(plan, CpuProgram)
        kv = manifest.kv
        try:
            instruction_set = _native.default_instruction_set()
            bytes_per_block = _native.kv_block_bytes(layers=kv_layers(kv), block_size=kv.block_size)
        except ValueError as error:
            raise PlanTargetError(f"{plan.path}: {error}") from error
        memory = manifest.limits.kv_memory_bytes if kv_memory_bytes is None else kv_memory_bytes
        num_blocks = check_pool_memory(plan.path, memory, bytes_per_block, kv.block_size)
        self._answers_hidden = program.hidden is not None
        self._heads = checked_heads(plan, has_program=program.heads is not None)
        self._draft_vocab = draft_vocab(plan, self._heads)
        self._pool = KvPoolInfo(num_blocks, kv.block_size, bytes_per_block)
        self._program = assemble(plan, program, num_blocks=num_blocks, threads=threads, instruction_set=instruction_set)
        if may_populate(memory):
            self._program.populate_pool()

    @property
    def pool(self) -> KvPoolInfo:
        """The KV pool this executor owns."""
        return self._pool

    @property
    def heads(self) -> HeadsInfo | None:
        """The plan's Medusa heads; None without any."""
        return self._heads

    @property
    def instruction_set(self) -> str:
        """The set whose kernels run."""
        return self._program.instruction_set

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises EngineError if its arrays reach outside the pool, the program or the vocabulary."""
        try:
            logits = self._program.execute(
                plan.tokens,
                plan.positions,
                plan.slots,
                plan.query_start,
                plan.context_len,
                np.ascontiguousarray(plan.block_table),  # may be columns of a wider table
                plan.logits_rows,
                plan.tree_mask,
            )
        except ValueError as error:
            raise EngineError(f"step of {len(plan.tokens)} tokens: {error}") from error
        return StepResult(logits, self._program.hidden() if self._answers_hidden else None)

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Copy K/V rows between slots, as if all were read before any is written.

        Raises EngineError if one reaches outside the pool.
        """
        try:
            self._program.move(src_slots, dst_slots)
        except ValueError as error:
            raise EngineError(f"move of {len(src_slots)} slots: {error}") from error

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:
        """Evaluate the heads for N rows: `hidden` [N, d] as `execute` gave it, `tokens` [N] sampled from them.

        Raises EngineError if there are no heads or the arrays do not fit them.
        """
        try:
            ids, logprobs = self._program.draft(np.ascontiguousarray(hidden), tokens, top, self._draft_vocab)
        except ValueError as error:
            raise EngineError(f"draft of {top} candidates for {len(tokens)} rows: {error}") from error
        return DraftCandidates(ids, logprobs)

    def close(self) -> None:
        """Release the pool, the threads and the weights. The executor cannot be used afterwards, the last step's
        logits can."""
        self._program.close()
