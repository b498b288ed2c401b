"""Both decompositions, run by ONNX Runtime, against the reference."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from optimc_passes.dialect import (
    DOMAIN,
    PagedAttention,
    PagedPorts,
    causal_attention,
    decompose_causal,
    decompose_paged,
    paged_attention,
)

ATOL = 2e-6
"""A few float32 roundings of values near 1."""

SPECS = [
    pytest.param(PagedAttention(0, 4, 4, 8, 0.35), id="mha"),
    pytest.param(PagedAttention(0, 4, 2, 24, 0.2), id="gqa2-dim24"),
    pytest.param(PagedAttention(0, 4, 1, 8, 0.35), id="gqa4"),
    pytest.param(PagedAttention(0, 4, 2, 8, 0.35, window=8), id="window"),
    pytest.param(PagedAttention(0, 4, 2, 8, 1.5, softcap=2.0), id="softcap"),
    pytest.param(PagedAttention(0, 4, 2, 8, 1.5, window=8, softcap=2.0), id="window-softcap"),
]


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    return dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in wanted}), strict=True))


def draw(spec: PagedAttention, tokens: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((tokens, width)).astype(np.float32)
        for width in (spec.q_width, spec.kv_width, spec.kv_width)
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_causal_equals_the_reference(attention_graph: Callable[..., ir.Model], spec: PagedAttention) -> None:
    model = decompose_causal(attention_graph(spec))
    assert DOMAIN not in model.opset_imports
    for tokens in (1, 7, 8, 9, 17):
        q, k, v = draw(spec, tokens)
        found = run(model, {"input_ids": np.zeros(tokens, np.int64), "q_0": q, "k_0": k, "v_0": v})
        np.testing.assert_allclose(found["out_0"], causal_attention(spec, q, k, v), atol=ATOL)


def test_the_original_is_left_alone(attention_graph: Callable[..., ir.Model]) -> None:
    model = attention_graph(PagedAttention(0, 4, 2, 8, 0.35))
    before = ir.to_proto(model).SerializeToString()
    decompose_causal(model)
    decompose_paged(model)
    assert ir.to_proto(model).SerializeToString() == before


class Batch:
    """Sequences in any phase: each has context in a shuffled pool and some tokens in this step."""

    def __init__(self, spec: PagedAttention, phases: list[tuple[int, int]], block_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.spec, self.block_size = spec, block_size
        self.context_len = np.array([context for context, _ in phases])
        counts = np.array([count for _, count in phases])
        self.query_start = np.concatenate([[0], np.cumsum(counts)])
        blocks_each = -(-(self.context_len + counts) // block_size)
        blocks = rng.permutation(blocks_each.sum())
        self.block_table = np.zeros((len(phases), blocks_each.max()), np.int64)
        for b, stop in enumerate(np.cumsum(blocks_each)):
            self.block_table[b, : blocks_each[b]] = blocks[stop - blocks_each[b] : stop]
        # The last row is finite and never written: padding points there.
        self.pools = [np.full((len(blocks) * block_size + 1, spec.kv_width), np.nan, np.float32) for _ in range(2)]
        for pool in self.pools:
            pool[-1] = 0
            for b, context in enumerate(self.context_len):
                pool[self.rows(b, 0, context)] = rng.standard_normal((context, spec.kv_width))
        self.positions = np.concatenate([np.arange(c, c + n) for c, n in phases])
        self.slots = np.concatenate([self.rows(b, c, c + n) for b, (c, n) in enumerate(phases)])
        self.q, self.k, self.v = draw(spec, counts.sum(), seed + 1)

    def rows(self, b: int, start: int, stop: int) -> np.ndarray:
        index = np.arange(start, stop)
        return self.block_table[b, index // self.block_size] * self.block_size + index % self.block_size

    def reference(self, tree_mask: np.ndarray | None = None) -> np.ndarray:
        return paged_attention(
            self.spec,
            self.q,
            self.k,
            self.v,
            key_pool=self.pools[0].copy(),
            value_pool=self.pools[1].copy(),
            slots=self.slots,
            positions=self.positions,
            query_start=self.query_start,
            context_len=self.context_len,
            block_table=self.block_table,
            block_size=self.block_size,
            tree_mask=tree_mask,
        )

    def feeds(self, ports: PagedPorts, tree_mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        counts = np.diff(self.query_start)
        num_seqs, longest, context = len(counts), counts.max(), self.context_len.max()
        window = self.spec.window
        query_index = np.zeros((num_seqs, longest), np.int64)
        context_slots = np.full((num_seqs, context), len(self.pools[0]) - 1)
        mask = np.zeros((num_seqs, longest, context + longest), bool)
        for b, count in enumerate(counts):
            first = self.query_start[b]
            context_slots[b, : self.context_len[b]] = self.rows(b, 0, self.context_len[b])
            for i in range(longest):
                token = first + min(i, count - 1)
                query_index[b, i] = token
                for j in range(self.context_len[b]):
                    mask[b, i, j] = not window or j > self.positions[token] - window
                for j in range(count):
                    sees = j <= token - first if tree_mask is None else tree_mask[token, j]
                    near = not window or self.positions[first + j] > self.positions[token] - window
                    mask[b, i, context + j] = sees and near
        return {
            "input_ids": np.zeros(len(self.q), np.int64),
            "q_0": self.q,
            "k_0": self.k,
            "v_0": self.v,
            ports.query_index: query_index,
            ports.unpad_index: np.concatenate([b * longest + np.arange(count) for b, count in enumerate(counts)]),
            ports.windows[0].context_slots: context_slots,
            ports.windows[0].mask: mask,
            ports.layers[0].key_pool: self.pools[0],
            ports.layers[0].value_pool: self.pools[1],
        }


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("spec", SPECS)
def test_paged_equals_the_reference(
    attention_graph: Callable[..., ir.Model], spec: PagedAttention, block_size: int
) -> None:
    model, ports = decompose_paged(attention_graph(spec))
    phases = [[(0, 5)], [(9, 1)], [(17, 1), (3, 1), (8, 1)], [(0, 9), (7, 1), (16, 4)], [(15, 17), (0, 1)]]
    for batch in (Batch(spec, each, block_size, seed) for seed, each in enumerate(phases)):
        found = run(model, batch.feeds(ports))
        np.testing.assert_allclose(found["out_0"], batch.reference(), atol=ATOL)
        np.testing.assert_array_equal(found[ports.layers[0].step_keys], batch.k)
        np.testing.assert_array_equal(found[ports.layers[0].step_values], batch.v)


@pytest.mark.parametrize("window", [0, 3])
def test_paged_follows_a_tree_mask(attention_graph: Callable[..., ir.Model], window: int) -> None:
    spec = PagedAttention(0, 4, 2, 8, 0.35, window=window)
    model, ports = decompose_paged(attention_graph(spec))
    batch = Batch(spec, [(6, 4), (2, 2)], block_size=4)
    batch.positions = np.array([6, 7, 7, 8, 2, 3])
    tree = np.zeros((6, 4), bool)
    for token, seen in enumerate(([0], [0, 1], [0, 2], [0, 2, 3], [0], [0, 1])):
        tree[token, seen] = True
    found = run(model, batch.feeds(ports, tree))
    np.testing.assert_allclose(found["out_0"], batch.reference(tree), atol=ATOL)


def test_layers_share_inputs_by_window_and_report_their_ports(attention_graph: Callable[..., ir.Model]) -> None:
    model, ports = decompose_paged(
        attention_graph(*(PagedAttention(i, 2, 1, 4, 0.5, window=w) for i, w in enumerate((8, 0, 8))))
    )
    assert [window.window for window in ports.windows] == [0, 8]
    assert [layer.window for layer in ports.layers] == [8, 0, 8]
    inputs = [value.name for value in model.graph.inputs]
    assert len(set(inputs)) == len(inputs)
    assert sum(name.startswith("mask") for name in inputs) == 2
