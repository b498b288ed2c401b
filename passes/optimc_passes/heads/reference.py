"""What Medusa heads mean, in NumPy: both lowerings' tests and the measuring of trained heads compare with it.

Letters: N rows, K heads, d hidden size, V' draft vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc_passes.heads.heads import SHARED_PROJECTION, Heads, block_bias, block_weight, own_projection
from optimc_passes.weights import Quantized, Weight


def head_hidden(
    heads: Heads, hidden: NDArray[np.float32], embedded: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return what each head's projection multiplies, [N, K, d].

    `hidden` [N, d] is what the model's output head multiplies. `embedded` [N, d] is the embedding of each row's root
    token as the model reads it, scale included; only conditioned heads take it.
    """
    info = heads.info
    assert (embedded is not None) == info.conditioned, "conditioned heads take embeddings, others take none"
    first = hidden if embedded is None else np.concatenate([hidden, embedded], axis=1)
    results = []
    for head in range(info.num_heads):
        x, rows = hidden, first
        for block in range(info.num_blocks):
            weight = _float32(heads.weights[block_weight(head, block)])
            x = x + _silu(rows @ weight.T + _float32(heads.weights[block_bias(head, block)]))
            rows = x
        results.append(x)
    return np.stack(results, axis=1)


def head_logits(
    heads: Heads,
    lm_head: NDArray[np.float32] | None,
    hidden: NDArray[np.float32],
    embedded: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return each head's logits over the draft vocabulary, [N, K, V'].

    `lm_head` [V, d] is the model's output head, read only by heads that share all of it.
    """
    rows = head_hidden(heads, hidden, embedded)
    if heads.info.projection == "own":
        matrices = [_float32(heads.weights[own_projection(head)]) for head in range(heads.info.num_heads)]
        return np.stack([rows[:, head] @ matrix.T for head, matrix in enumerate(matrices)], axis=1)
    shared = heads.weights.get(SHARED_PROJECTION)
    matrix = lm_head if shared is None else _float32(shared)
    assert matrix is not None, "heads that share the whole output head need it"
    return rows @ matrix.T


def _float32(weight: Weight) -> NDArray[np.float32]:
    return weight.dequantize() if isinstance(weight, Quantized) else weight.read().astype(np.float32)


def _silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        result: NDArray[np.float32] = x / (1 + np.exp(-x))
    return result
