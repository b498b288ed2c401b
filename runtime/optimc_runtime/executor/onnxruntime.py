"""The ONNX Runtime executor: the portable reference.

The graph reads the KV pool and returns this step's K/V rows; the executor commits them to their slots. Weights are
mapped from the plan file by ONNX Runtime itself; its kernels keep a rearranged copy of the matrices they multiply by,
so memory holds each of them once.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, MissingExtraError, PlanCorruptError, PlanTargetError
from optimc.plan import HeadsInfo, Plan
from optimc.plan.program_section import read_program
from optimc_runtime import _native
from optimc_runtime.executor.base import DraftCandidates, KvPoolInfo, StepPlan, StepResult
from optimc_runtime.executor.external_weights import ExternalWeight, declare_weights
from optimc_runtime.executor.heads import checked_heads, draft_vocab
from optimc_runtime.executor.onnx_program import OnnxHeads, OnnxProgram
from optimc_runtime.executor.pool_memory import check_pool_memory
from optimc_runtime.executor.step_groups import Group, lay_out, split, view

BACKEND = "onnxruntime"

_FLOAT32_ACTIVATIONS, _INT8_ACTIVATIONS = "1", "4"
"""Values of ONNX Runtime's accuracy level for fused quantized products."""

_DISABLED_OPTIMIZERS = ["MatMulAddFusion"]
"""Turns a product and the addition after it into a Gemm, which keeps a quantized product from its fused kernel: the
weight would be dequantized in every step."""


class OnnxRuntimeExecutor:
    """Runs steps of a plan lowered for ONNX Runtime on the CPU. See `Executor`.

    The pool is float32: per layer, keys and values [P * S + 1, Hkv * D]. The last row stays zero; padding reads it.
    """

    def __init__(self, plan: Plan, *, kv_memory_bytes: int | None = None, threads: int | None = None) -> None:
        """Check the plan, create the session and allocate the pool.

        `kv_memory_bytes` defaults to the manifest's, `threads` to one per physical core. Raises PlanTargetError if the
        plan wants another backend, version or cache type, or the memory does not hold one block or exceeds the
        machine's; PlanCorruptError if its program is damaged; MissingExtraError if ONNX Runtime is not installed.
        """
        manifest = plan.manifest
        runtime = _checked_runtime(plan)
        program = read_program(plan, OnnxProgram)
        if len(program.attention.layers) != len(manifest.kv.layers):
            raise PlanCorruptError(
                f"{plan.path}: {len(manifest.kv.layers)} layers in the KV layout, "
                f"{len(program.attention.layers)} in the program"
            )
        self._hidden = program.hidden
        self._heads = checked_heads(plan, has_program=program.heads is not None)
        self._draft_vocab = draft_vocab(plan, self._heads)
        self._vocab_size = manifest.model.vocab_size
        self._ports = program.attention
        self._block_size = manifest.kv.block_size
        widths = [layer.num_kv_heads * layer.head_dim for layer in manifest.kv.layers]
        bytes_per_block = sum(2 * width * np.dtype(np.float32).itemsize * self._block_size for width in widths)
        memory = manifest.limits.kv_memory_bytes if kv_memory_bytes is None else kv_memory_bytes
        num_blocks = check_pool_memory(plan.path, memory, bytes_per_block, self._block_size)
        self._pool_info = KvPoolInfo(num_blocks, self._block_size, bytes_per_block)
        self._null_row = num_blocks * self._block_size
        self._session = _create_session(runtime, plan, program, program, threads)
        self._heads_session: Any = None
        if program.heads is not None:
            self._heads_session = _create_session(runtime, plan, program.heads, program, threads)
            _check_heads(plan, self._heads_session, self._heads)
        self._binding = self._session.io_binding()
        self._output_names = [output.name for output in self._session.get_outputs()]
        self._ort_value = runtime.OrtValue.ortvalue_from_numpy
        self._key_pools = [np.zeros((self._null_row + 1, width), np.float32) for width in widths]
        self._value_pools = [np.zeros((self._null_row + 1, width), np.float32) for width in widths]
        for ports, keys, values in zip(self._ports.layers, self._key_pools, self._value_pools, strict=True):
            self._binding.bind_ortvalue_input(ports.key_pool, self._ort_value(keys))
            self._binding.bind_ortvalue_input(ports.value_pool, self._ort_value(values))

    @property
    def pool(self) -> KvPoolInfo:
        """The KV pool this executor owns."""
        return self._pool_info

    @property
    def heads(self) -> HeadsInfo | None:
        """The plan's Medusa heads; None without any."""
        return self._heads

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises EngineError if ONNX Runtime fails; then no block written by this step may be used."""
        assert len(plan.tokens) == plan.query_start[-1], "query_start ends at the number of tokens"
        logits = np.empty((len(plan.logits_rows), self._vocab_size), np.float32)
        hidden: NDArray[np.float32] | None = None
        for group in split(plan):
            outputs = self._run(plan, group)
            logits[group.rows] = outputs["logits"].numpy()
            if self._hidden is not None:
                rows = outputs[self._hidden].numpy()
                if hidden is None:
                    hidden = np.empty((len(logits), rows.shape[1]), np.float32)
                hidden[group.rows] = rows
        return StepResult(logits, hidden)

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Copy K/V rows between slots, as if all were read before any is written."""
        for pool in (*self._key_pools, *self._value_pools):
            pool[dst_slots] = pool[src_slots]  # Indexing by an array copies, so reads come first.

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:
        """Evaluate the heads for N rows: `hidden` [N, d] as `execute` gave it, `tokens` [N] sampled from them.

        Raises EngineError if there are no heads, the arrays do not fit them, or ONNX Runtime fails.
        """
        info = self._heads
        what = f"draft of {top} candidates for {len(tokens)} rows"
        if info is None:
            raise EngineError(f"{what}: the program has no heads")
        if not len(tokens) or hidden.shape != (len(tokens), info.hidden_size):
            raise EngineError(f"{what}: hidden states {list(hidden.shape)}, want a row of {info.hidden_size} for each")
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise EngineError(f"{what}: a token id is not in the vocabulary")
        feeds = {"hidden": np.ascontiguousarray(hidden), "tokens": tokens}
        try:
            (logits,) = self._heads_session.run(["logits"], feeds if info.conditioned else {"hidden": feeds["hidden"]})
        except Exception as error:  # ONNX Runtime's exceptions share no base of their own
            raise EngineError(f"onnxruntime failed in a {what}: {error}") from error
        try:
            places, logprobs = _native.top_rows(logits.reshape(-1, info.draft_vocab_size), top)
        except ValueError as error:
            raise EngineError(f"{what}: {error}") from error
        shape = (len(tokens), info.num_heads, top)
        ids = places if self._draft_vocab is None else self._draft_vocab[places]
        return DraftCandidates(ids.reshape(shape), logprobs.reshape(shape))

    def close(self) -> None:
        """Release the pool and the session. The executor cannot be used afterwards."""
        self._key_pools, self._value_pools = [], []
        self._binding = self._session = self._heads_session = None

    def _run(self, plan: StepPlan, group: Group) -> dict[str, Any]:
        """Run one group, commit its K/V rows and return its outputs."""
        layout = lay_out(plan, group)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": plan.tokens[group.tokens],
            "position_ids": plan.positions[group.tokens],
            "logits_rows": group.logits_rows,
            self._ports.query_index: layout.query_index,
            self._ports.unpad_index: layout.unpad_index,
        }
        for window in self._ports.windows:
            seen = view(plan, group, layout, window.window, self._block_size, self._null_row)
            inputs |= {window.context_slots: seen.context_slots, window.mask: seen.mask}
        outputs = self._call(inputs)
        slots = plan.slots[group.tokens]
        for ports, keys, values in zip(self._ports.layers, self._key_pools, self._value_pools, strict=True):
            keys[slots] = outputs[ports.step_keys].numpy()
            values[slots] = outputs[ports.step_values].numpy()
        return outputs

    def _call(self, inputs: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Run the graph on `inputs` and the pool; return its outputs by name."""
        assert self._binding is not None, "the executor is closed"
        # The binding borrows the arrays' memory: they must live until the run is over.
        borrowed = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in borrowed.items():
            self._binding.bind_ortvalue_input(name, self._ort_value(array))
        for name in self._output_names:
            self._binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no base of their own
            tokens = len(inputs["input_ids"])
            raise EngineError(f"onnxruntime failed in a step of {tokens} tokens: {error}") from error
        outputs = dict(zip(self._output_names, self._binding.get_outputs(), strict=True))
        self._binding.clear_binding_outputs()
        return outputs


def _checked_runtime(plan: Plan) -> ModuleType:
    """Return the onnxruntime module if it and this executor meet everything the plan requires."""
    target = plan.manifest.target
    if target.backend != BACKEND:
        raise PlanTargetError(f"{plan.path}: built for '{target.backend}', this is the {BACKEND} executor")
    for dtype in plan.manifest.kv.dtypes:
        if dtype != "float32":
            raise PlanTargetError(f"{plan.path}: wants a {dtype} KV cache, {BACKEND} has float32 only")
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "ort", f"serving {plan.path}") from error
    for name, wanted in target.requirements.items():
        if name != "onnxruntime" or not wanted.startswith(">="):
            raise PlanTargetError(f"{plan.path}: requires {name} {wanted}, which this optimc cannot check; update it")
        if _version(onnxruntime.__version__) < _version(wanted.removeprefix(">=")):
            raise PlanTargetError(
                f"{plan.path}: requires onnxruntime {wanted}, installed is {onnxruntime.__version__}; "
                "pip install -U onnxruntime"
            )
    module: ModuleType = onnxruntime
    return module


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _create_session(
    runtime: ModuleType, plan: Plan, graph: OnnxProgram | OnnxHeads, program: OnnxProgram, threads: int | None
) -> Any:
    """Return a session over one of the program's graphs."""
    path = plan.path.resolve()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    # Threads spin between the kernels of a step, where gaps are microseconds, and sleep between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    options.add_session_config_entry(
        "session.qdq_matmulnbits_accuracy_level",
        _INT8_ACTIVATIONS if program.int8_activations else _FLOAT32_ACTIVATIONS,
    )
    model = declare_weights(plan.blob(graph.model), _weights(plan, graph, path))
    try:
        session = runtime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=_DISABLED_OPTIMIZERS
        )
    except Exception as error:  # ONNX Runtime's exceptions share no base of their own
        raise PlanTargetError(
            f"{plan.path}: onnxruntime {runtime.__version__} cannot load the program: {error}"
        ) from error
    # ONNX Runtime opens the file by name: make sure that it met the file whose offsets it was given.
    with Plan.open(path) as reopened:
        if reopened.content_hash != plan.content_hash:
            raise PlanTargetError(f"{plan.path}: replaced by another plan while it was being loaded; load it again")
    return session


def _check_heads(plan: Plan, session: Any, info: HeadsInfo | None) -> None:
    """Raise PlanCorruptError unless the heads' model has the form that the manifest describes."""
    assert info is not None, "checked_heads compares manifest and program"
    inputs = {port.name: port.shape[1:] for port in session.get_inputs()}
    outputs = {port.name: port.shape[1:] for port in session.get_outputs()}
    wanted = {"hidden": [info.hidden_size], **({"tokens": []} if info.conditioned else {})}
    logits = {"logits": [info.num_heads, info.draft_vocab_size]}
    if inputs != wanted or outputs != logits:
        raise PlanCorruptError(
            f"{plan.path}: the program's heads read {inputs} and give {outputs}, the manifest describes {wanted} and "
            f"{logits}"
        )


def _weights(plan: Plan, graph: OnnxProgram | OnnxHeads, path: Path) -> list[ExternalWeight]:
    weights = []
    for name, entry in graph.initializers.items():
        spec = plan.spec(entry.tensor)
        weights.append(ExternalWeight(name, entry.onnx_dtype, entry.shape, path.name, spec.offset, spec.nbytes))
    return weights
