"""A graph for TensorRT run by ONNX Runtime, call by call, over pools as the executor keeps them.

Letters: T tokens in a call, B sequences, Q longest query, C longest context, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from optimc_passes.emit.tensorrt.network_graph import NetworkGraph
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.step_groups import Group, lay_out, view

BLOCK = 4


def session_of(model: ir.Model) -> onnxruntime.InferenceSession:
    """ONNX Runtime over a graph as it is written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    proto = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


class Served:
    """A graph with its pools: sequences are computed in calls, the rows each call answers are committed."""

    def __init__(self, graph: NetworkGraph, *, blocks: int = 64, seed: int = 0) -> None:
        self.graph = graph
        self._session = session_of(graph.model)
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        rows = blocks * BLOCK + 1
        self.pools = {
            value.name: np.zeros((rows, value.shape[1]), np.dtype(ir.DataType(value.dtype).numpy()))
            for value in graph.model.graph.inputs
            if value.shape is not None and str(value.shape[0]) == "rows"
        }
        self._free = np.random.default_rng(seed).permutation(blocks).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}
        self.answers: dict[str, NDArray[Any]] = {}
        """What the last call answered, by output."""

    def call(
        self,
        tokens: dict[str, NDArray[np.int64]],
        *,
        rows: Sequence[int] | None = None,
        parents: Sequence[int] | None = None,
        keep: bool = True,
        padded_context: int = 0,
    ) -> NDArray[np.float32]:
        """Compute tokens of sequences by name and return the logits of rows (all of them).

        `parents`: the tokens of the one sequence are a tree, node i hangs below parents[i] (-1: the context).
        Without `keep` nothing is committed. `padded_context` null rows are put into each context.
        """
        plan = self._plan(tokens, rows, parents)
        feeds = self._feeds(plan, padded_context)
        self.answers = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        if keep:
            self.commit(plan.slots)
            for name, each in tokens.items():
                self.length[name] += len(each)
        return self.answers["logits"]

    def feeds(self, tokens: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        """Return what a call of these tokens is given."""
        return self._feeds(self._plan(tokens, None, None), 0)

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Write the last call's rows to slots."""
        for layer in self.graph.attention.layers:
            for port in (layer.keys, layer.values):
                self.pools[port.pool][slots] = self.answers[port.step]
                if port.pool_scales is not None:
                    self.pools[port.pool_scales][slots] = self.answers[port.step_scales]

    def _plan(
        self, tokens: dict[str, NDArray[np.int64]], rows: Sequence[int] | None, parents: Sequence[int] | None
    ) -> StepPlan:
        starts, slots, positions = [0], [], []
        for name, each in tokens.items():
            start = self.length.setdefault(name, 0)
            table = self.blocks.setdefault(name, [])
            index = np.arange(start, start + len(each))
            while len(table) * BLOCK < start + len(each):
                table.append(self._free.pop())
            slots.append(np.array(table)[index // BLOCK] * BLOCK + index % BLOCK)
            positions.append(index if parents is None else start + _depths(parents))
            starts.append(starts[-1] + len(each))
        widest = max(len(self.blocks[name]) for name in tokens)
        count = starts[-1]
        return StepPlan(
            tokens=np.concatenate(list(tokens.values())),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            query_start=np.array(starts, np.int32),
            context_len=np.array([self.length[name] for name in tokens], np.int32),
            block_table=np.array(
                [self.blocks[name] + [0] * (widest - len(self.blocks[name])) for name in tokens], np.int32
            ),
            logits_rows=np.arange(count) if rows is None else np.array(rows, np.int64),
            tree_mask=None if parents is None else _sees(parents),
        )

    def _feeds(self, plan: StepPlan, padded_context: int) -> dict[str, NDArray[Any]]:
        everyone = Group(np.arange(len(plan.context_len)), np.arange(len(plan.tokens)), np.arange(0), plan.logits_rows)
        layout = lay_out(plan, everyone)
        ports = self.graph.attention
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": plan.tokens,
            "position_ids": plan.positions.astype(np.int64),
            "logits_rows": plan.logits_rows,
            ports.query_index: layout.query_index,
            ports.unpad_index: layout.unpad_index,
            **self.pools,
        }
        null_row = len(next(iter(self.pools.values()))) - 1
        for window in ports.windows:
            seen = view(plan, everyone, layout, window.window, BLOCK, null_row)
            # No dimension is 0 on TensorRT, so a context never is.
            more = max(padded_context, 1 - seen.context_slots.shape[1])
            count = seen.context_slots.shape[1]
            feeds[window.context_slots] = np.pad(seen.context_slots, ((0, 0), (0, more)), constant_values=null_row)
            feeds[window.mask] = np.insert(seen.mask, [count] * more, False, axis=2)
        return {name: array for name, array in feeds.items() if name in self._inputs}


def _sees(parents: Sequence[int]) -> NDArray[np.bool_]:
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def _depths(parents: Sequence[int]) -> NDArray[np.int64]:
    return _sees(parents).sum(axis=1) - 1
