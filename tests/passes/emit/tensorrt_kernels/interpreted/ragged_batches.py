"""Random ragged steps over a paged cache, as numbers for the reference and tensors for the kernel."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.emit.tensorrt_kernels.attention_tiles import MAX_SPLITS, AttentionTile
from optimc_passes.emit.tensorrt_kernels.attention_variant import AttentionVariant
from optimc_passes.emit.tensorrt_kernels.merge_splits_kernel import merge_splits
from optimc_passes.emit.tensorrt_kernels.paged_attention_kernel import paged_attention
from optimc_passes.emit.tensorrt_kernels.paged_attention_reference import CacheRows, RaggedStep
from optimc_passes.emit.tensorrt_kernels.plugin_design import attention_launch

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass
class Batch:
    spec: PagedAttention
    step: RaggedStep
    half: str
    q: np.ndarray
    caches: dict[str, CacheRows]


def make_batch(rng, spec, queries, contexts, *, block_size=16, half="float16", pool="half", tree=None):
    """`tree` is the number of mask columns; sequences of as many queries or fewer get a random tree."""
    queries, contexts = np.array(queries), np.array(contexts)
    query_start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    tokens = int(query_start[-1])
    per_sequence = -(-(contexts + queries) // block_size)
    num_blocks = int(per_sequence.sum()) + 1
    table = np.zeros((len(queries), int(per_sequence.max())), np.int32)
    blocks = iter(1 + rng.permutation(num_blocks - 1))
    for b, count in enumerate(per_sequence):
        table[b, :count] = [next(blocks) for _ in range(count)]
    positions = np.concatenate([context + np.arange(count) for context, count in zip(contexts, queries, strict=True)])
    mask = None
    if tree is not None:
        mask = np.zeros((tokens, tree), bool)
        for start, count, context in zip(query_start, queries, contexts, strict=False):
            if count <= tree:
                sees, depths = random_tree(rng, count)
                mask[start : start + count, :count] = sees
                positions[start : start + count] = context + depths
    step = RaggedStep(query_start, contexts.astype(np.int32), table, positions, block_size, mask)
    caches = {
        name: make_cache(rng, rows, spec, half, pool)
        for name, rows in {
            "step_keys": tokens,
            "step_values": tokens,
            "key_pool": num_blocks * block_size,
            "value_pool": num_blocks * block_size,
        }.items()
    }
    q = rng.standard_normal((tokens, spec.q_width)).astype(HALVES[half])
    return Batch(spec, step, half, q, caches)


def random_tree(rng, count):
    """Return which nodes each of `count` sees (itself and its ancestors), and depths; node 0 is the root."""
    sees, depths = np.eye(count, dtype=bool), np.zeros(count, np.int64)
    for node in range(1, count):
        parent = int(rng.integers(node))
        sees[node] |= sees[parent]
        depths[node] = depths[parent] + 1
    return sees, depths


def make_cache(rng, rows, spec, half, pool):
    numbers = rng.standard_normal((rows, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
    if pool == "half":
        return CacheRows(numbers.reshape(rows, -1).astype(HALVES[half]))
    largest = 127.0 if pool == "int8" else 448.0
    scales = (np.abs(numbers).max(axis=2) / largest).astype(np.float16)
    codes = numbers / scales.astype(np.float32)[..., None]
    codes = np.rint(codes).clip(-127, 127).astype(np.int8) if pool == "int8" else codes.astype(ml_dtypes.float8_e4m3fn)
    return CacheRows(codes.reshape(rows, -1), scales)


def tensor(array):
    """The torch tensor over a copy of a NumPy array, bfloat16 and float8 included."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.int8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


def plugin_launch(batch, tile_rows, tokens):
    """Return grid and sizes as the plugin asks TensorRT for them."""
    spec, step = batch.spec, batch.step
    has_tree = step.tree_mask is not None
    variant = AttentionVariant(
        *(spec.num_heads, spec.num_kv_heads, spec.head_dim, step.block_size, batch.half, batch.half),
        *(spec.scale, spec.softcap, spec.window, has_tree),
    )
    sizes = {"q": (tokens, spec.q_width), "context_len": step.context_len.shape, "block_table": step.block_table.shape}
    return attention_launch(
        variant,
        AttentionTile(tile_rows, 16, 4, 2),
        sizes | ({"tree_mask": step.tree_mask.shape} if has_tree else {}),
    )


def run_kernel(batch, *, splits=None, queries_tile=16, keys_tile=32, padding=0):
    """Return float32 [T + padding, H*D]: what the kernel answers under the interpreter.

    `splits`: None for one part, a number to be merged, "plugin" for as many as the plugin takes. `padding` tokens
    follow those of the last sequence; NaN where nothing was written.
    """
    spec, step = batch.spec, batch.step
    tokens = len(batch.q) + padding
    launch = plugin_launch(batch, queries_tile, tokens)
    num_parts = launch.grid[2] if splits == "plugin" else splits or 1
    caches = [batch.caches[name] for name in ("step_keys", "step_values", "key_pool", "value_pool")]
    scales = [batch.caches[name].scales for name in ("key_pool", "value_pool", "step_keys", "step_values")]
    out = torch.full((tokens, spec.q_width), float("nan"), dtype=getattr(torch, batch.half))
    parts = torch.full((num_parts, tokens, spec.q_width), float("nan"))
    log_sums = torch.full((num_parts, tokens, spec.num_heads), float("nan"))
    width = 1 << (spec.head_dim - 1).bit_length()
    paged_attention[(*launch.grid[:2], num_parts)](
        tensor(np.concatenate([batch.q, batch.q[:padding]])),
        *(tensor(cache.codes) for cache in caches),
        *(None if scale is None else tensor(scale) for scale in scales),
        tensor(step.query_start),
        tensor(step.context_len),
        tensor(step.block_table),
        tensor(step.positions) if step.tree_mask is not None else None,
        tensor(step.tree_mask.view(np.uint8)) if step.tree_mask is not None else None,
        *launch.extra,
        out if splits is None else parts,
        None if splits is None else log_sums,
        SCALE=spec.scale,
        SOFTCAP=spec.softcap,
        WINDOW=spec.window,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        BLOCK_SIZE=step.block_size,
        SPLIT=splits is not None,
        M=queries_tile,
        N=keys_tile,
        D=width,
    )
    if splits is not None:
        rows = tokens * spec.num_heads
        merge_splits[(rows,)](
            parts, log_sums, rows, num_parts, out, MAX_SPLITS=MAX_SPLITS, HEAD_DIM=spec.head_dim, D=width
        )
    return out.float().numpy()
