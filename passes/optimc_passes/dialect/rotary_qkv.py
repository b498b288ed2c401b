"""What `optimc::RotaryQkv` means: the product that gives query, key and value becomes what attention reads.

A row of the product holds query, key and value heads side by side. Query and key are normed where the node has norms,
then rotated where it has angles; the value stays as it is.

Letters: T tokens, H query heads, Hkv key/value heads, D head dim, F frequencies (half of the rotated dimensions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc_passes.dialect.add_rms_norm import rms_normalize

ROTARY_QKV = "RotaryQkv"


@dataclass(frozen=True, slots=True)
class RotaryQkv:
    """The attributes of one node. Its operands are qkv, cos, sin, q_norm, k_norm; all but the first may be absent."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    """Dimensions at the start of each head that are rotated, 2 * F; 0 if the node has no angles."""
    interleaved: bool = False
    """Whether a frequency turns neighbours (2i, 2i + 1) rather than (i, i + F)."""
    epsilon: float = 0.0
    """Of the norms; 0 if the node has none."""

    @classmethod
    def from_node(cls, node: ir.Node) -> RotaryQkv:
        """Read a node that obeys the dialect's rules (see `rules.verify_graph`)."""
        attributes = node.attributes
        return cls(
            num_heads=attributes["num_heads"].as_int(),
            num_kv_heads=attributes["num_kv_heads"].as_int(),
            head_dim=attributes["head_dim"].as_int(),
            rotary_dim=attributes["rotary_dim"].as_int(),
            interleaved=bool(attributes["interleaved"].as_int()),
            epsilon=attributes["epsilon"].as_float(),
        )

    @property
    def q_width(self) -> int:
        """H * D, the width of q."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Hkv * D, the width of k and of v."""
        return self.num_kv_heads * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        return self.q_width, self.kv_width, self.kv_width


def rotary_qkv(
    spec: RotaryQkv,
    qkv: NDArray[Any],
    cos: NDArray[Any] | None = None,
    sin: NDArray[Any] | None = None,
    q_norm: NDArray[Any] | None = None,
    k_norm: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return q [T, H*D], k [T, Hkv*D] and v [T, Hkv*D] in the dtype of `qkv` [T, (H + 2 * Hkv) * D].

    `cos` and `sin` [T, F] are the angles of each token. A norm [D] is applied to each head, one [H*D] (or [Hkv*D] for
    the key) to the whole row.
    """
    q, k, v = np.split(qkv, [spec.q_width, spec.q_width + spec.kv_width], axis=1)
    if q_norm is not None and k_norm is not None:
        q, k = _normed(q, q_norm, spec.epsilon), _normed(k, k_norm, spec.epsilon)
    if cos is not None and sin is not None:
        q, k = (rotated(spec, rows, cos, sin) for rows in (q, k))
    return q, k, v


def rotated(spec: RotaryQkv, rows: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[Any]:
    """Return packed heads [T, X*D] with the first `rotary_dim` dimensions of each turned: ONNX's RotaryEmbedding."""
    heads = rows.reshape(len(rows), -1, spec.head_dim)
    turned, rest = heads[..., : spec.rotary_dim], heads[..., spec.rotary_dim :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    half = spec.rotary_dim // 2
    first, second = (turned[..., ::2], turned[..., 1::2]) if spec.interleaved else np.split(turned, [half], axis=-1)
    pair = first * cos - second * sin, first * sin + second * cos
    turned = np.stack(pair, axis=-1).reshape(turned.shape) if spec.interleaved else np.concatenate(pair, axis=-1)
    return np.concatenate([turned, rest], axis=-1).reshape(rows.shape)


def _normed(rows: NDArray[Any], scale: NDArray[Any], epsilon: float) -> NDArray[Any]:
    return rms_normalize(rows.reshape(len(rows), -1, len(scale)), scale, epsilon).reshape(rows.shape)
