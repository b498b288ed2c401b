"""Attention over gathered pools equals the reference in NumPy: ragged batches, windows, soft caps, trees, int8 rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from optimc.errors import LoweringError
from optimc.plan import KvLayer, KvLayout
from optimc_passes.dialect import PagedAttention, paged_attention
from optimc_passes.emit.tensorrt.attention_form import has_fused_kernel
from optimc_passes.emit.tensorrt.network_graph import network_graph

EXACT = 5e-6
"""A few float32 roundings of values near 1."""
HALF = 5e-3
"""Queries, keys, values and weights of about 1 are rounded to 11 bits each, scores of up to 10 before a softmax."""

SPECS = {
    "mha": PagedAttention(0, 4, 4, 16, 0.25),
    "gqa2-dim24": PagedAttention(0, 4, 2, 24, 0.2),
    "gqa4": PagedAttention(0, 4, 1, 16, 0.25),
    "window": PagedAttention(0, 4, 2, 16, 0.25, window=8),
    "primitives-dim8": PagedAttention(0, 4, 2, 8, 0.35),
    "primitives-dim20-window": PagedAttention(0, 4, 2, 20, 0.2, window=3),
    "softcap": PagedAttention(0, 4, 2, 16, 1.5, softcap=2.0),
    "window-softcap": PagedAttention(0, 4, 2, 8, 1.5, window=8, softcap=2.0),
}
PHASES = [[(0, 5)], [(9, 1)], [(17, 1), (3, 1), (8, 1)], [(0, 9), (7, 1), (16, 4)], [(15, 17), (0, 1)]]


def network(model, spec, pool="float16", **layer):
    layers = (KvLayer(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, window=spec.window, **layer),)
    kv = KvLayout(block_size=4, dtype=pool, layers=layers)
    return network_graph(model, precision="float16", kv=kv, hidden=False)


def feeds_of(batch, ports, pools, tree_mask=None):
    """What a call of the batch is given, with `pools` by port."""
    layer = SimpleNamespace(key_pool="k", value_pool="v")
    layout = SimpleNamespace(
        query_index=ports.query_index, unpad_index=ports.unpad_index, windows=ports.windows, layers=[layer]
    )
    feeds = batch.feeds(layout, tree_mask)
    slots, mask = ports.windows[0].context_slots, ports.windows[0].mask
    if feeds[slots].shape[1] == 0:  # as the executor does: no dimension of a call is 0
        null_row = len(batch.pools[0]) - 1
        feeds[slots] = np.full((len(batch.context_len), 1), null_row)
        feeds[mask] = np.pad(feeds[mask], ((0, 0), (0, 0), (1, 0)))
    return {**{name: array for name, array in feeds.items() if name not in ("k", "v")}, **pools}


def float_pools(batch, ports, dtype):
    layer = ports.layers[0]
    return {port.pool: pool.astype(dtype) for port, pool in zip((layer.keys, layer.values), batch.pools, strict=True)}


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("name", list(SPECS))
def test_it_equals_the_reference(attention_graph, batch, run, name):
    spec = SPECS[name]
    assert has_fused_kernel(spec) == (not name.startswith("primitives") and "softcap" not in name)
    graph = network(attention_graph(spec), spec)
    for seed, phases in enumerate(PHASES):
        each = batch(spec, phases, 4, seed)
        found = run(graph.model, feeds_of(each, graph.attention, float_pools(each, graph.attention, np.float32)))
        np.testing.assert_allclose(found["out_0"], each.reference(), atol=EXACT)
        np.testing.assert_array_equal(found["step_keys_0"], each.k)


@pytest.mark.parametrize("name", list(SPECS))
def test_in_half_it_reads_and_writes_half_rows(attention_graph, batch, run, name):
    spec = SPECS[name]
    graph = network(attention_graph(spec), spec)
    each = batch(spec, PHASES[3], 4)
    found = run(graph.model, feeds_of(each, graph.attention, float_pools(each, graph.attention, np.float16)))
    np.testing.assert_allclose(found["out_0"], each.reference(), atol=HALF)
    for rows, exact in (("step_keys_0", each.k), ("step_values_0", each.v)):
        assert found[rows].dtype == np.float16
        np.testing.assert_array_equal(found[rows], exact.astype(np.float16))


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("dim", [8, 16])
def test_it_follows_a_tree(attention_graph, batch, run, window, dim):
    spec = PagedAttention(0, 4, 2, dim, 0.35, window=window)
    graph = network(attention_graph(spec), spec)
    each = batch(spec, [(6, 4), (2, 2)], 4)
    each.positions = np.array([6, 7, 7, 8, 2, 3])
    tree = np.zeros((6, 4), bool)
    for token, seen in enumerate(([0], [0, 1], [0, 2], [0, 2, 3], [0], [0, 1])):
        tree[token, seen] = True
    pools = float_pools(each, graph.attention, np.float32)
    found = run(graph.model, feeds_of(each, graph.attention, pools, tree))
    np.testing.assert_allclose(found["out_0"], each.reference(tree), atol=EXACT)
    causal = run(graph.model, feeds_of(each, graph.attention, pools))
    assert np.abs(found["out_0"] - causal["out_0"]).max() > 0.01, "siblings do not see each other"


@pytest.mark.parametrize("name", ["gqa2-dim24", "window", "softcap"])
def test_a_ragged_batch_is_its_sequences_one_by_one_and_padding_changes_nothing(attention_graph, batch, run, name):
    """To the bit where padding is concerned: what a mask hides has a weight of 0, whatever it is."""
    spec = SPECS[name]
    graph = network(attention_graph(spec), spec)
    together = batch(spec, [(5, 3), (2, 3)], 4)
    pools = float_pools(together, graph.attention, np.float16)
    feeds = feeds_of(together, graph.attention, pools)
    both = run(graph.model, feeds)["out_0"]
    slots, mask = graph.attention.windows[0].context_slots, graph.attention.windows[0].mask
    wider = {**feeds, slots: np.pad(feeds[slots], ((0, 0), (0, 4)), constant_values=len(together.pools[0]) - 1)}
    wider[mask] = np.insert(feeds[mask], [feeds[slots].shape[1]] * 4, False, axis=2)
    np.testing.assert_allclose(run(graph.model, wider)["out_0"], both, atol=1e-3)
    for b, (start, stop) in enumerate(((0, 3), (3, 6))):
        alone = dict(feeds)
        for letter in "qkv":
            alone[f"{letter}_0"] = feeds[f"{letter}_0"][start:stop]
        alone[graph.attention.query_index] = feeds[graph.attention.query_index][b : b + 1] - start
        alone[graph.attention.unpad_index] = np.arange(3)
        alone[slots], alone[mask] = feeds[slots][b : b + 1], feeds[mask][b : b + 1]
        np.testing.assert_allclose(run(graph.model, alone)["out_0"], both[start:stop], atol=1e-3)


def rounded(rows, spec):
    """Codes and scales of rows [N, Hkv * D] by the rule of the cpu target's pool, with float16 scales."""
    split = rows.reshape(len(rows), spec.num_kv_heads, spec.head_dim)
    scales = (np.abs(split).max(axis=-1) / np.float32(127)).astype(np.float16)
    exact = scales.astype(np.float32)[..., None]
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.round(split / np.where(exact > 0, exact, 1)), -127, 127)
    return np.nan_to_num(codes).astype(np.int8).reshape(rows.shape), scales


def read_back(rows, spec):
    codes, scales = rounded(rows, spec)
    split = codes.reshape(len(rows), spec.num_kv_heads, spec.head_dim).astype(np.float32)
    return (split * scales.astype(np.float32)[..., None]).reshape(rows.shape)


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("name", ["gqa2-dim24", "window", "softcap", "primitives-dim8"])
def test_an_int8_pool_is_attended_to_as_it_is_rounded(attention_graph, batch, run, name):
    """The step's own rows too. Against the reference with the same rounding, what is left is float32's."""
    spec = SPECS[name]
    graph = network(attention_graph(spec), spec, pool="int8")
    layer = graph.attention.layers[0]
    each = batch(spec, PHASES[3], 4)
    pools = {}
    for port, pool in zip((layer.keys, layer.values), each.pools, strict=True):
        pools[port.pool], pools[port.pool_scales] = rounded(np.nan_to_num(pool), spec)
    found = run(graph.model, feeds_of(each, graph.attention, pools))
    for port, exact in ((layer.keys, each.k), (layer.values, each.v)):
        codes, scales = rounded(exact, spec)
        np.testing.assert_array_equal(found[port.step], codes)
        np.testing.assert_array_equal(found[port.step_scales], scales)
        assert (found[port.step].dtype, found[port.step_scales].dtype) == (np.int8, np.float16)
    expected = paged_attention(
        spec,
        each.q,
        each.k,
        each.v,
        key_pool=read_back(np.nan_to_num(each.pools[0]), spec),
        value_pool=read_back(np.nan_to_num(each.pools[1]), spec),
        slots=each.slots,
        positions=each.positions,
        query_start=each.query_start,
        context_len=each.context_len,
        block_table=each.block_table,
        block_size=4,
        store_keys=lambda rows: read_back(rows, spec),
        store_values=lambda rows: read_back(rows, spec),
    )
    np.testing.assert_allclose(found["out_0"], expected, atol=EXACT)
    assert np.abs(expected - each.reference()).max() > 100 * EXACT, "rounding shows"


def test_rows_without_a_scale_are_zeros_and_those_not_finite_show_in_their_sequence_alone(attention_graph, batch, run):
    spec = SPECS["mha"]
    graph = network(attention_graph(spec), spec, pool="int8")
    layer = graph.attention.layers[0]
    each = batch(spec, [(0, 3), (0, 1)], 4)
    each.k[0] = 0
    each.k[1] = 1e-9
    each.v[3, 5] = np.inf
    pools = {port.pool: np.zeros(each.pools[0].shape, np.int8) for port in (layer.keys, layer.values)}
    pools |= {p.pool_scales: np.zeros((len(each.pools[0]), 4), np.float16) for p in (layer.keys, layer.values)}
    found = run(graph.model, feeds_of(each, graph.attention, pools))
    np.testing.assert_array_equal(found[layer.keys.step][:2], 0)
    np.testing.assert_array_equal(found[layer.keys.step_scales][:2], 0)
    assert np.isfinite(found["out_0"][:3]).all()
    assert np.isnan(found["out_0"][3, :16]).all()
    assert np.isfinite(found["out_0"][3, 16:]).all(), "nor do other heads see it"


def test_keys_with_scales_of_channels_are_refused_by_the_node(attention_graph):
    spec = SPECS["mha"]
    options = {"keys": "channel", "key_scales": "kv/0/key_scales", "provenance": "calibrated"}
    with pytest.raises(
        LoweringError, match=r"node '.*': .* no scales of keys per channel; use kv_quant: {keys: token}"
    ):
        network(attention_graph(spec), spec, pool="int8", **options)


def test_layers_share_inputs_by_window(attention_graph):
    specs = [PagedAttention(i, 2, 1, 16, 0.5, window=w) for i, w in enumerate((8, 0, 8))]
    layers = tuple(KvLayer(num_kv_heads=1, head_dim=16, window=spec.window) for spec in specs)
    kv = KvLayout(block_size=4, dtype="float16", layers=layers)
    ports = network_graph(attention_graph(*specs), precision="float16", kv=kv, hidden=False).attention
    assert [window.window for window in ports.windows] == [0, 8]
    assert [layer.window for layer in ports.layers] == [8, 0, 8]
