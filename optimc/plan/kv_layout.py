"""How a plan's KV cache is laid out: a paged pool, and for every attention layer its geometry and number format."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    """Plan tensor, float32 [num_kv_heads, head_dim]; only where keys is "channel". A key, rotated already, is stored as
    round((key - minimum) / scale), saturated."""
    key_minimums: str | None = None
    """As `key_scales`, for int4; int8 has none."""


class KvLayout(_Section):
    """The paged KV cache: P blocks of S slots for every layer."""

    block_size: int = Field(gt=0)
    """Slots S per block."""
    dtype: KvDtype
    layers: tuple[KvLayer, ...] = Field(min_length=1)

    def dtype_of(self, layer: int) -> KvDtype:
        """Return what a layer's cache holds."""
        return self.layers[layer].dtype or self.dtype

    @property
    def dtypes(self) -> tuple[KvDtype, ...]:
        """What any layer's cache holds, in the order of their first layers."""
        return tuple(dict.fromkeys(map(self.dtype_of, range(len(self.layers)))))

    @property
    def is_uncalibrated(self) -> bool:
        """Whether any layer's scales were assumed, neither measured nor computed as tokens are written."""
        return any(layer.provenance == "default" for layer in self.layers)

    @model_validator(mode="after")
    def _scales_fit(self) -> KvLayout:
        for index, layer in enumerate(self.layers):
            dtype, channel = self.dtype_of(index), layer.keys == "channel"
            if channel and dtype not in ("int8", "int4"):
                raise ValueError(f"layer {index}: keys with scales of channels in a cache of {dtype}")
            if channel != (layer.key_scales is not None):
                raise ValueError(f"layer {index}: keys per {layer.keys} {'need' if channel else 'have no'} key_scales")
            if (channel and dtype == "int4") != (layer.key_minimums is not None):
                raise ValueError(f"layer {index}: key_minimums are for keys per channel in int4, and needed there")
        return self
