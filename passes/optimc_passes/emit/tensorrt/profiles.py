"""The shapes engines are built for: two optimization profiles of the model, one of the heads.

Letters: T tokens in a call, B sequences, Q longest query, C longest context, R rows that need logits, N rows to draft
for. Beside them, graphs name the pool's rows `rows`, and keys in sight of a call `K`, which are C + Q; a suffix that
sets windows apart changes no bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from optimc.plan.tensorrt_program import ShapeLetter, TensorRtProfile

DECODE_QUERIES = 16
"""Longest query in a decode-like call: the last token and a tree of guesses. Chunks of prompts are longer."""

_LIKELY_SEQS, _LIKELY_CONTEXT = 8, 1024
"""What full TensorRT chooses its kernels for, where limits allow so much."""
_LARGEST_VALUES = (1 << 31) - 1
"""Values of a tensor: kernels index with 32 bits."""

Sizes = Mapping[ShapeLetter, int]
Shape = tuple[int, ...]


def model_profiles(max_seqs: int, max_step_tokens: int, max_seq_len: int) -> tuple[TensorRtProfile, TensorRtProfile]:
    """Return the profiles in the engine's order: many short queries, and one sequence's long chunk.

    No size is ever 0: contexts are padded with the pool's last row, rows of logits with row 0.
    """
    queries = min(DECODE_QUERIES, max_step_tokens)
    seqs = min(max_seqs, max_step_tokens)
    likely, context = min(seqs, _LIKELY_SEQS), min(max_seq_len, _LIKELY_CONTEXT)
    ones: dict[ShapeLetter, int] = {"T": 1, "B": 1, "Q": 1, "C": 1, "R": 1}
    most = min(max_step_tokens, seqs * queries)
    decode = TensorRtProfile(
        name="decode",
        smallest=ones,
        likely={"T": likely, "B": likely, "Q": 1, "C": context, "R": likely},
        largest={"T": most, "B": seqs, "Q": queries, "C": max_seq_len, "R": most},
    )
    chunk = max_step_tokens
    prefill = TensorRtProfile(
        name="prefill",
        smallest=ones,
        likely={"T": chunk, "B": 1, "Q": chunk, "C": context, "R": 1},
        largest={"T": chunk, "B": 1, "Q": chunk, "C": max_seq_len, "R": chunk},
    )
    return decode, prefill


def draft_profile(max_seqs: int) -> TensorRtProfile:
    """Return the profile of an engine of Medusa heads: a row for each sequence at most."""
    likely = min(max_seqs, _LIKELY_SEQS)
    return TensorRtProfile(name="draft", smallest={"N": 1}, likely={"N": likely}, largest={"N": max_seqs})


def input_shapes(dims: tuple[int | str, ...], profile: TensorRtProfile) -> tuple[Shape, Shape, Shape]:
    """Return the smallest, the likeliest and the largest shape of an input with these dimensions.

    Raises KeyError for a dimension the profile does not know.
    """
    width = 1
    for dim in dims:
        width *= dim if isinstance(dim, int) else 1
    rows = max(1, _LARGEST_VALUES // width)

    def shape(sizes: Sizes, pool_rows: int) -> Shape:
        return tuple(dim if isinstance(dim, int) else _size(dim, sizes, pool_rows) for dim in dims)

    likely_rows = min(rows, 1 << 16)
    return shape(profile.smallest, 1), shape(profile.likely, likely_rows), shape(profile.largest, rows)


def _size(dim: str, sizes: Sizes, pool_rows: int) -> int:
    letter = dim.partition("_")[0]
    if letter == "rows":
        return pool_rows
    if letter == "K":
        return sizes["C"] + sizes["Q"]
    return {str(name): size for name, size in sizes.items()}[letter]
