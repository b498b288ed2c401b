"""The reference against a triple loop that shares nothing with it."""

import math

import numpy as np
import pytest

from optimc_passes.dialect import PagedAttention, causal_attention, paged_attention


def brute_force(spec: PagedAttention, q: np.ndarray, k: np.ndarray, v: np.ndarray, sees) -> np.ndarray:
    """float64 loops over queries and heads; `sees(i, j)` says whether query i sees key j."""
    out = np.zeros((len(q), spec.num_heads * spec.head_dim))
    d = spec.head_dim
    for i in range(len(q)):
        for h in range(spec.num_heads):
            kv = h // (spec.num_heads // spec.num_kv_heads)
            scores = {}
            for j in range(len(k)):
                if sees(i, j):
                    dot = sum(float(q[i, h * d + c]) * float(k[j, kv * d + c]) for c in range(d)) * spec.scale
                    scores[j] = spec.softcap * math.tanh(dot / spec.softcap) if spec.softcap else dot
            total = sum(math.exp(s) for s in scores.values())
            for j, s in scores.items():
                out[i, h * d : (h + 1) * d] += math.exp(s) / total * v[j, kv * d : (kv + 1) * d]
    return out


def draw(spec: PagedAttention, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = spec.q_width, spec.kv_width, spec.kv_width
    q, k, v = (rng.standard_normal((tokens, width)) for width in widths)
    return q, k, v


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 1.5), (3, 1.5)])
def test_causal_equals_loops(num_kv_heads: int, window: int, softcap: float) -> None:
    spec = PagedAttention(0, 4, num_kv_heads, 6, 0.7, window, softcap)
    q, k, v = draw(spec, 7)
    expected = brute_force(spec, q, k, v, lambda i, j: j <= i and (not window or j > i - window))
    np.testing.assert_allclose(causal_attention(spec, q, k, v), expected, atol=1e-12)


@pytest.mark.parametrize("length", [7, 8, 9, 17])
def test_window_of_eight_counts_the_query_itself(length: int) -> None:
    spec = PagedAttention(0, 2, 1, 4, 0.5, window=8)
    q, k, v = draw(spec, length)
    expected = brute_force(spec, q, k, v, lambda i, j: i - 8 < j <= i)
    np.testing.assert_allclose(causal_attention(spec, q, k, v), expected, atol=1e-12)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_in_two_steps_equals_causal_at_once(block_size: int) -> None:
    spec = PagedAttention(0, 4, 2, 6, 0.4, window=5, softcap=2.0)
    q, k, v = draw(spec, 11)
    blocks = np.random.default_rng(1).permutation(11)
    pools = np.full((2, 11 * block_size, spec.kv_width), np.nan)
    index = np.arange(11)
    slots = blocks[index // block_size] * block_size + index % block_size
    parts = [
        paged_attention(
            spec,
            q[start:stop],
            k[start:stop],
            v[start:stop],
            key_pool=pools[0],
            value_pool=pools[1],
            slots=slots[start:stop],
            positions=index[start:stop],
            query_start=np.array([0, stop - start]),
            context_len=np.array([start]),
            block_table=blocks[None, :],
            block_size=block_size,
        )
        for start, stop in [(0, 6), (6, 11)]
    ]
    np.testing.assert_allclose(np.concatenate(parts), causal_attention(spec, q, k, v), atol=1e-12)
    np.testing.assert_array_equal(pools[0][slots], k)


def test_tree_nodes_see_their_ancestors_and_the_window_counts_depth() -> None:
    spec = PagedAttention(0, 2, 2, 4, 0.5, window=3)
    q, k, v = draw(spec, 6)
    # Two tokens of context, then a root with two children, one of which has a child of its own.
    positions = np.array([0, 1, 2, 3, 3, 4])
    ancestors = {2: {2}, 3: {2, 3}, 4: {2, 4}, 5: {2, 4, 5}}
    tree = np.array([[j in ancestors[i] for j in range(2, 6)] for i in range(2, 6)])
    pools = np.zeros((2, 6, spec.kv_width))
    pools[0][:2], pools[1][:2] = k[:2], v[:2]
    found = paged_attention(
        spec,
        q[2:],
        k[2:],
        v[2:],
        key_pool=pools[0],
        value_pool=pools[1],
        slots=np.arange(2, 6),
        positions=positions[2:],
        query_start=np.array([0, 4]),
        context_len=np.array([2]),
        block_table=np.array([[0]]),
        block_size=6,
        tree_mask=tree,
    )
    expected = brute_force(
        spec,
        q,
        k,
        v,
        lambda i, j: (j < 2 if i > 1 and j < 2 else j in ancestors.get(i, {i})) and positions[j] > positions[i] - 3,
    )
    np.testing.assert_allclose(found, expected[2:], atol=1e-12)


def test_a_lossy_cache_is_attended_to_as_it_is_stored() -> None:
    spec = PagedAttention(0, 2, 1, 4, 0.5)
    q, k, v = draw(spec, 5)
    found = paged_attention(
        spec,
        q,
        k,
        v,
        key_pool=np.zeros((5, 4)),
        value_pool=np.zeros((5, 4)),
        slots=np.arange(5),
        positions=np.arange(5),
        query_start=np.array([0, 5]),
        context_len=np.array([0]),
        block_table=np.array([[0]]),
        block_size=5,
        store_keys=np.round,
        store_values=np.floor,
    )
    np.testing.assert_allclose(found, causal_attention(spec, q, np.round(k), np.floor(v)), atol=1e-12)
    assert not np.allclose(found, causal_attention(spec, q, k, v))


def test_float32_stays_float32() -> None:
    spec = PagedAttention(0, 2, 1, 4, 0.5, softcap=3.0)
    q, k, v = (array.astype(np.float32) for array in draw(spec, 5))
    assert causal_attention(spec, q, k, v).dtype == np.float32
