"""How a plan's KV cache is laid out: a paged pool, and for every attention layer its geometry and number format."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KvDtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "fp8"]

KvKeys = Literal["token", "channel"]
"""What a scale of keys belongs to: one token of one head, written with it, or one feature of a head for all tokens."""

KvProvenance = Literal["dynamic", "calibrated", "default"]
"""Where scales come from: computed as tokens are written, measured on calibration text, or assumed."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KvLayer(_Section):
    """Cache geometry of one attention layer."""

    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    window: int = Field(ge=0)
    """Sliding window in tokens; 0 means none."""
    dtype: KvDtype | None = None
    """None: the layout's."""
    keys: KvKeys = "token"
    provenance: KvProvenance = "dynamic"
    calibration_tokens: int = Field(default=0, ge=0)
    key_scales: str | None = None
    """Plan tensor, float32 [num_kv_heads, head_dim]; only where keys is "channel"."""
    key_minimums: str | None = None
    """As `key_scales`, for int4."""


class KvLayout(_Section):
    """The paged KV cache: P blocks of S slots for every layer."""

    block_size: int = Field(gt=0)
    """Slots S per block."""
    dtype: KvDtype
    layers: tuple[KvLayer, ...] = Field(min_length=1)

    def dtype_of(self, layer: int) -> KvDtype:
        """Return what a layer's cache holds."""
        return self.layers[layer].dtype or self.dtype
