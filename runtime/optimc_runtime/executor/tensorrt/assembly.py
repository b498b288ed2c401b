"""From a plan's program section to what runs on a GPU: kernels, engines, memory, contexts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType

from optimc.plan import HeadsInfo, Plan
from optimc.plan.tensorrt_program import TensorRtEngine as EngineSection
from optimc.plan.tensorrt_program import TensorRtProgram
from optimc_runtime.executor.heads import draft_vocab
from optimc_runtime.executor.tensorrt.call_runner import CallRunner
from optimc_runtime.executor.tensorrt.check_ports import check_heads_ports, check_model_ports
from optimc_runtime.executor.tensorrt.cuda import CudaDevice
from optimc_runtime.executor.tensorrt.draft import DraftHeads
from optimc_runtime.executor.tensorrt.engine import TensorRtEngine, TensorRtRuntime
from optimc_runtime.executor.tensorrt.host_rows import HostRows
from optimc_runtime.executor.tensorrt.model_memory import ModelMemory
from optimc_runtime.executor.tensorrt.pool import CacheTensor, check_pool_rows, check_scratch
from optimc_runtime.executor.tensorrt.row_kernels import KERNELS, RowKernels, choose_kernel


@dataclass(frozen=True)
class Assembled:
    """A plan, ready to run steps."""

    runner: CallRunner
    logits: HostRows
    hidden: HostRows | None
    """None if the plan answers no hidden states."""
    heads: DraftHeads | None


def assemble(
    plan: Plan,
    program: TensorRtProgram,
    device: CudaDevice,
    trt: ModuleType,
    tensors: Sequence[CacheTensor],
    info: HeadsInfo | None,
    *,
    num_blocks: int,
    graphs: bool,
    resources: ExitStack,
) -> Assembled:
    """Load and allocate everything; `resources` closes it, also what was made before a failure.

    Raises PlanTargetError if an engine or a kernel does not run on this GPU or its memory is too small,
    PlanCorruptError if an engine is not what the program says.
    """
    vocab = draft_vocab(plan, info)
    chosen = [choose_kernel(plan, program.kernels, name, device.architecture) for name in KERNELS]
    runtime = TensorRtRuntime(trt, device)
    resources.callback(runtime.close)
    model = _load(plan, program.model, runtime, resources)
    check_model_ports(_where(plan, program.model), model, program, tensors, plan.manifest.model)
    check_pool_rows(plan.path, num_blocks * plan.manifest.kv.block_size + 1, model, tensors)
    heads = None
    if program.heads is not None and info is not None:
        heads = _load(plan, program.heads, runtime, resources)
        check_heads_ports(_where(plan, program.heads), heads, program.heads, info)
    # Both engines run on one stream, so they compute in the same memory.
    scratch_bytes = max(model.scratch_bytes, heads.scratch_bytes if heads else 0)
    check_scratch(plan.path, device, scratch_bytes)
    scratch = device.allocate(scratch_bytes)
    resources.callback(device.free, scratch)
    drafting = None
    if program.heads is not None and heads is not None and info is not None:
        profile = program.heads.profiles[0]
        drafting = DraftHeads(device, heads, profile, scratch, info, vocab, graphs=graphs)
        resources.callback(drafting.close)
    limits, sizes = plan.manifest.limits, plan.manifest.model
    rows = min(limits.max_seqs, limits.max_step_tokens)
    logits = HostRows(device, sizes.vocab_size, rows)
    resources.callback(logits.close)
    hidden = None
    if program.hidden is not None:
        hidden = HostRows(device, sizes.hidden_size, rows)
        resources.callback(hidden.close)
    memory = ModelMemory(plan, program, device, tensors, num_blocks)
    resources.callback(memory.close)
    images = [plan.blob(kernel.tensor) for kernel in chosen]
    kernels = RowKernels(device, chosen, images, tensors, memory.pool, memory.step)
    resources.callback(kernels.close)
    block_size = plan.manifest.kv.block_size
    runner = CallRunner(device, model, program, memory, kernels, block_size=block_size, scratch=scratch, graphs=graphs)
    resources.callback(runner.close)
    return Assembled(runner, logits, hidden, drafting)


def _load(plan: Plan, section: EngineSection, runtime: TensorRtRuntime, resources: ExitStack) -> TensorRtEngine:
    engine = runtime.load(plan.tensor(section.tensor), _where(plan, section))
    resources.callback(engine.close)
    return engine


def _where(plan: Plan, section: EngineSection) -> str:
    return f"{plan.path}: engine '{section.tensor}'"
