"""Attention of a ragged step over a paged cache. Meaning: `paged_attention_reference`.

Importing this file imports Triton. Letters: T tokens, B sequences, H query heads, Hkv key/value heads, D head dim, W
blocks of a sequence, S slots per block, Q mask columns, G heads per key/value head, Z splits, M rows and N keys of a
tile.

Launched on a grid of (T // (M // G) + B, Hkv, Z). A program takes M // G queries of one sequence with the G heads that
share a key/value head, so that every key is read once for all of them, and of the keys they see the z-th part. The
grid has room for every sequence's last, partly filled tile; programs without a tile end at once.

    q                              half [T, H*D]
    step_keys, step_values         [T, Hkv*D], this step's rows as the pool stores them
    key_pool, value_pool           half, int8 or float8 e4m3 [slots, Hkv*D]
    …_scales                       float16 [slots, Hkv] and [T, Hkv] of an int8 or float8 pool; None for a half pool
    query_start, context_len       int32 [B+1], [B]
    block_table                    int32 [B, W]
    positions                      int64 [T]; read where there are both a tree and a window; may be None elsewhere
    tree_mask                      one byte each [T, Q]: which tokens of its own sequence a token sees; None is causal
    num_tokens, num_seqs, table_width, mask_width   int32 T, B, W, Q; tokens beyond query_start[B] are left alone
    out                            without SPLIT half [T, H*D]; with it float32 [Z, T, H*D], each part normalized
    log_sums                       with SPLIT float32 [Z, T, H]: log2 of the part's sum of exponentials, -inf if it saw
                                   nothing, and then `out` has no values there; None without

A sequence with more queries than the mask has columns is causal: a long prompt needs no mask of its length beside the
trees. Causal queries stand at positions context_len, context_len + 1, ….
"""

# Triton's language has types of its own, and compile-time constants are upper case there.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from optimc_passes.emit.tensorrt_kernels.attention_tile import attend_tile, load_rows


@triton.jit
def find_sequence(query_start, num_seqs, tile, QUERIES: tl.constexpr):
    """Return the last sequence whose first tile, query_start // QUERIES + b, is at or before `tile`."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def paged_attention(
    q,
    step_keys,
    step_values,
    key_pool,
    value_pool,
    key_pool_scales,
    value_pool_scales,
    step_key_scales,
    step_value_scales,
    query_start,
    context_len,
    block_table,
    positions,
    tree_mask,
    num_tokens,
    num_seqs,
    table_width,
    mask_width,
    out,
    log_sums,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """D is HEAD_DIM rounded up to a power of two, M at least 16 and at least HEADS / KV_HEADS."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = M // GROUP
    SCALED: tl.constexpr = key_pool_scales is not None
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    seq = find_sequence(query_start, num_seqs, tile, QUERIES)
    start = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start
    first = (tile - start // QUERIES - seq) * QUERIES
    if first >= num_queries:
        return
    context = tl.load(context_len + seq)

    row = tl.arange(0, M)
    query = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_query = (row < QUERIES * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    column = tl.arange(0, D)
    q_at = token[:, None] * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    q_inside = is_query[:, None] & (column < HEAD_DIM)[None, :]
    queries = tl.load(q + q_at, mask=q_inside, other=0.0)

    # Keys are numbered through: the context's, then this step's. The tile sees some of [begin, end).
    begin = 0
    end = context + tl.minimum(num_queries, first + QUERIES)
    position = context + query
    if tree_mask is not None:
        is_tree = num_queries <= mask_width
        tree_width = tl.where(is_tree, mask_width, 0)
        end = tl.where(is_tree, context + num_queries, end)
        if WINDOW > 0:
            position = tl.load(positions + token, mask=is_query, other=0).to(tl.int32)
    if WINDOW > 0:
        lowest = tl.min(tl.where(is_query, position, 2147483647), axis=0)
        begin = tl.maximum(lowest - (WINDOW - 1), 0)
        if tree_mask is not None:
            # In a tree a key's number is not its position: none of this step's may be left out.
            begin = tl.where(is_tree, tl.minimum(begin, context), begin)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), N) * N
        begin += part * share
        end = tl.minimum(end, begin + share)

    total = tl.zeros([M, D], tl.float32)
    weight = tl.zeros([M], tl.float32)
    highest = tl.full([M], float("-inf"), tl.float32)
    table = block_table + seq.to(tl.int64) * table_width

    for lowest_key in range(begin, tl.minimum(end, context), N):
        key = lowest_key + tl.arange(0, N)
        inside = key < tl.minimum(end, context)
        slot = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        keys, key_scale = load_rows(key_pool, key_pool_scales, slot, inside, kv_head, KV_HEADS, HEAD_DIM, D)
        values, value_scale = load_rows(value_pool, value_pool_scales, slot, inside, kv_head, KV_HEADS, HEAD_DIM, D)
        visible = is_query[:, None] & inside[None, :]
        if WINDOW > 0:
            visible &= position[:, None] - key[None, :] < WINDOW
        total, weight, highest = attend_tile(
            queries, keys, key_scale, values, value_scale, visible, total, weight, highest, SCALED, SCALE, SOFTCAP
        )

    for lowest_key in range(tl.maximum(begin, context) - context, end - context, N):
        key = lowest_key + tl.arange(0, N)
        inside = key < end - context
        step = (start + key).to(tl.int64)
        keys, key_scale = load_rows(step_keys, step_key_scales, step, inside, kv_head, KV_HEADS, HEAD_DIM, D)
        values, value_scale = load_rows(step_values, step_value_scales, step, inside, kv_head, KV_HEADS, HEAD_DIM, D)
        visible = is_query[:, None] & inside[None, :]
        key_position = context + key
        if tree_mask is not None:
            seen_at = (start + query)[:, None] * mask_width + key[None, :]
            seen = tl.load(tree_mask + seen_at, mask=visible & (key < tree_width)[None, :], other=0)
            visible &= tl.where(is_tree, seen != 0, key[None, :] <= query[:, None])
            if WINDOW > 0:
                key_position = tl.load(positions + step, mask=inside, other=0).to(tl.int32)
        else:
            visible &= key[None, :] <= query[:, None]
        if WINDOW > 0:
            visible &= position[:, None] - key_position[None, :] < WINDOW
        total, weight, highest = attend_tile(
            queries, keys, key_scale, values, value_scale, visible, total, weight, highest, SCALED, SCALE, SOFTCAP
        )

    saw = weight > 0
    divisor = tl.where(saw, weight, 1.0)
    mean = total / divisor[:, None]
    if SPLIT:
        first_token = part.to(tl.int64) * num_tokens
        log_sum = tl.where(saw, highest + tl.log2(divisor), float("-inf"))
        tl.store(log_sums + (first_token + token) * HEADS + head, log_sum, mask=is_query)
        tl.store(out + first_token * (HEADS * HEAD_DIM) + q_at, mean, mask=q_inside & saw[:, None])
    else:
        tl.store(out + q_at, mean.to(out.dtype.element_ty), mask=q_inside)
