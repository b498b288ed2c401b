"""Running the artifact of a build as it would be served, for passes that learn from what the model says.

A plan is written aside and run by the runtime's engine; hidden states are those the served model computes, to the bit
on the cpu target.
"""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optimc.build.chat_frame import chat_frame_of
from optimc.build.lowering_options import lowering_options
from optimc.build.manifest import assemble_manifest, tokenizer_tensors
from optimc.errors import EngineError, PlanTargetError
from optimc.plan import GraphReport, Plan, write_plan

if TYPE_CHECKING:
    from optimc.recipe import Recipe
    from optimc_passes.artifact import Artifact
    from optimc_passes.checkpoint import Checkpoint
    from optimc_passes.emit import LoweringOptions
    from optimc_passes.heads.target_model import ChatFrame, OnTokens
    from optimc_runtime.engine import Engine
    from optimc_runtime.executor.base import Executor, StepPlan
    from optimc_runtime.request import RequestOutput

_NO_GRAPH = GraphReport(
    exported_nodes=0, cleaned_nodes=0, attached_nodes=0, fused_nodes=0, export_seconds=0, graph_seconds=0
)
_TIMED = 15
"""Times each size of a step is run for its median."""
_SHAPES_ONLY = ("block_size", "max_step_tokens", "max_seqs", "max_seq_len", "hidden", "cache")
"""Options that change no bit of a hidden state: what a token's state is depends on the tokens before it alone."""


class BuildModels:
    """How one build runs its artifact."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, max_seq_len: int, cache: Path) -> None:
        from optimc_passes.artifact import derive_key
        from optimc_passes.emit import TARGETS

        self._recipe, self._checkpoint, self._max_seq_len = recipe, checkpoint, max_seq_len
        self._target = TARGETS[recipe.target.backend]
        options = lowering_options(recipe.target, recipe.limits, max_seq_len=max_seq_len, cache=cache)
        self._options = replace(options, hidden=True)
        self.key: str = derive_key(recipe.target.backend, self._target.version, _key_facts(options))

    @contextmanager
    def open(self, artifact: Artifact, scratch: Path) -> Iterator[ServedModel]:
        """Lower the artifact, write it below `scratch` and run it.

        Raises LoweringError if the target has no kernels for it, MissingExtraError or PlanTargetError where it cannot
        run.
        """
        from optimc_passes.pipeline import PipelineResult
        from optimc_runtime.config import EngineConfig
        from optimc_runtime.engine import Engine
        from optimc_runtime.executor.load import load_executor

        reason = self._target.why_not_here(self._options)
        if reason is not None:
            raise PlanTargetError(reason)
        lowered = self._target(artifact, self._options)
        result = PipelineResult(artifact, (), _NO_GRAPH)
        manifest = assemble_manifest(
            self._recipe, self._checkpoint, None, lowered, result, key="", max_seq_len=self._max_seq_len
        )
        path = scratch / "sampled.plan"
        write_plan(path, manifest, [*lowered.tensors, *tokenizer_tensors(self._checkpoint.tokenizer)])
        del lowered
        try:
            with Plan.open(path) as plan:
                executor = load_executor(plan)
                # Prompts share no more than a template, and steps are timed on blocks nobody may remember.
                engine = Engine(executor, plan.manifest, None, EngineConfig(prefix_cache=False))
                with engine:
                    yield ServedModel(engine, executor, self._frame(), self._checkpoint.eos)
        finally:
            path.unlink()

    def _frame(self) -> ChatFrame | str:
        from optimc_runtime.tokenizer import Tokenizer

        assets = self._checkpoint.tokenizer
        special = dict(assets.special_tokens)
        tokenizer = None if assets.tokenizer_json is None else Tokenizer(assets.tokenizer_json, special)
        return chat_frame_of(assets.chat_template, tokenizer, special)


def _key_facts(options: LoweringOptions) -> dict[str, Any]:
    """Return the options that hidden states depend on. What a target alone has, others leave unset, and keys of heads
    that were trained before it had it stay as they are."""
    from optimc_passes.emit.tensorrt_options import NAMES

    facts = {name: value for name, value in asdict(options).items() if name not in _SHAPES_ONLY}
    for name in NAMES:
        if facts[name] is None:
            del facts[name]
    return facts | {"kv_dtype": options.kv_dtype or "float32"}


class ServedModel:
    """A `TargetModel` on the runtime's engine."""

    def __init__(self, engine: Engine, executor: Executor, frame: ChatFrame | str, eos: Sequence[int]) -> None:
        self._engine, self._executor = engine, executor
        self.hidden_size: int = engine.manifest.model.hidden_size
        self.vocab_size: int = engine.vocab_size
        self.max_seq_len: int = engine.limits.max_request_tokens
        self.max_seqs: int = engine.limits.max_running
        self.chat: ChatFrame | None = None if isinstance(frame, str) else frame
        self.no_chat: str = frame if isinstance(frame, str) else ""
        self.eos: frozenset[int] = frozenset(eos)
        self.machine: str = _machine()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: frozenset[int],
        on_tokens: OnTokens,
    ) -> None:
        """Continue every prompt; see `TargetModel`. Raises EngineError if a step fails."""
        from optimc_runtime.request import SamplingParams

        # Twice as many as run: the queue is never empty, and never full.
        room = threading.Semaphore(2 * self.max_seqs)
        failures: list[BaseException] = []
        for index, prompt in enumerate(prompts):
            most = min(max_tokens, self.max_seq_len - len(prompt))
            if most < 1:
                on_tokens(index, np.zeros(0, np.int64), np.zeros((0, self.hidden_size), np.float32))
                continue
            params = SamplingParams(
                max_tokens=most,
                temperature=temperature,
                top_p=top_p,
                seed=seed + index,
                stop_token_ids=tuple(sorted(stop_ids)),
                ignore_eos=True,
                speculation="off",
            )
            room.acquire()
            if failures:
                room.release()
                break
            answer = _Answer(index, self.hidden_size, on_tokens, room, failures)
            self._engine.submit(prompt, params, on_output=answer.take_output, on_hidden=answer.take_hidden)
        for _ in range(2 * self.max_seqs):
            room.acquire()
        if failures:
            raise failures[0]

    def step_costs(self, rows: Sequence[int], context: int = 256) -> dict[int, float]:
        """Return the median seconds of a step of one sequence by its rows; the engine must be idle.

        Sizes beyond the largest step are left out.
        """
        rows = [count for count in rows if count <= self._engine.limits.max_step_tokens]
        context = max(1, min(context, self.max_seq_len - max(rows)))
        plans = {count: self._chain(count, context) for count in rows}
        seconds: dict[int, list[float]] = {count: [] for count in rows}
        for round_ in range(_TIMED + 1):
            for count, plan in plans.items():
                start = time.perf_counter()
                self._executor.execute(plan)
                if round_:  # the first touches memory
                    seconds[count].append(time.perf_counter() - start)
        return {count: statistics.median(measured) for count, measured in seconds.items()}

    def _chain(self, count: int, context: int) -> StepPlan:
        from optimc_runtime.executor.base import StepPlan

        block = self._executor.pool.block_size
        positions = np.arange(context, context + count, dtype=np.int64)
        return StepPlan(
            tokens=np.arange(count, dtype=np.int64) % self.vocab_size,
            positions=positions,
            slots=positions,  # of blocks 0, 1, 2, ...
            query_start=np.array([0, count], np.int32),
            context_len=np.array([context], np.int32),
            block_table=np.arange(-(-(context + count) // block), dtype=np.int32)[None],
            logits_rows=np.arange(count, dtype=np.int64),
        )


class _Answer:
    """Collects one answer, on the engine's thread."""

    def __init__(
        self,
        index: int,
        hidden_size: int,
        on_tokens: OnTokens,
        room: threading.Semaphore,
        failures: list[BaseException],
    ) -> None:
        self._index, self._on_tokens, self._room, self._failures = index, on_tokens, room, failures
        self._tokens: list[int] = []
        self._hidden: list[NDArray[np.float32]] = [np.zeros((0, hidden_size), np.float32)]

    def take_hidden(self, hidden: NDArray[np.float32]) -> None:
        self._hidden.append(hidden.copy())

    def take_output(self, output: RequestOutput) -> None:
        self._tokens += output.token_ids
        if output.finish_reason is None:
            return
        try:
            if output.finish_reason in ("abort", "error"):
                raise output.error or EngineError("the engine was closed while text was sampled")
            hidden = np.concatenate(self._hidden)
            assert len(hidden) == len(self._tokens), (len(hidden), len(self._tokens))
            self._on_tokens(self._index, np.array(self._tokens, np.int64), hidden)
        except Exception as error:  # the thread that waits raises it
            self._failures.append(error)
        finally:
            self._room.release()


def _machine() -> str:
    """Return what steps were timed on, in a few words."""
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    name = next(names, "") or platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
