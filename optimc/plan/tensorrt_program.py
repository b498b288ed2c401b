"""The `program` section of a plan lowered for TensorRT: where engines and kernels lie, and what ports are called.

Letters: T tokens in a call, B sequences, Q longest query, C longest context in reach, R rows that need logits, V
vocabulary, H query heads, Hkv key/value heads, D head dim, d hidden size, N rows to draft for, K Medusa heads.

Ports of attention are named here; the model's others are always `input_ids` int64 [T], `position_ids` int64 [T],
`logits_rows` int64 [R] and `logits` float32 [R, V], those of the heads `hidden` float32 [N, d], `tokens` int64 [N] if
they are conditioned, and `logits` float32 [N, K, V'].
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Flavor = Literal["tensorrt", "rtx"]
"""Full TensorRT, which builds on the GPU that serves, or TensorRT-RTX, which builds anywhere for named ones."""

HalfType = Literal["float16", "bfloat16"]

ShapeLetter = Literal["T", "B", "Q", "C", "R", "N"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorRtWindow(_Section):
    """Inputs shared by all layers with the same window."""

    window: int = Field(ge=0)
    """Sliding window in tokens; 0 means none."""
    context_slots: str
    """int64 [B, C]: pool row of each context token in reach; padding names the pool's last row, which holds zeros."""
    mask: str
    """bool [B, Q, C + Q]: which keys (context, then this call's own) each query sees; at least one."""


class TensorRtCache(_Section):
    """Keys or values of one layer: the pool goes in, the call's new rows come out, both as the pool stores them."""

    pool: str
    """Input [rows, Hkv * D], half or int8, one row per slot and a last one of zeros."""
    step: str
    """Output [T, Hkv * D]: rows to be written to the call's slots."""
    pool_scales: str | None = None
    """Input float16 [rows, Hkv], int8 only."""
    step_scales: str | None = None
    """Output float16 [T, Hkv], int8 only."""


class TensorRtLayer(_Section):
    """One attention layer's ports."""

    window: int = Field(ge=0)
    keys: TensorRtCache
    values: TensorRtCache


class TensorRtAttention(_Section):
    """What attention adds to the engine's ports."""

    query_index: str
    """int64 [B, Q]: token of the call at each padded place."""
    unpad_index: str
    """int64 [T]: place of each token in the flattened [B * Q]."""
    windows: tuple[TensorRtWindow, ...]
    """One per distinct window, ascending."""
    layers: tuple[TensorRtLayer, ...]
    """Indexed by layer."""


class TensorRtProfile(_Section):
    """The shapes one optimization profile was built for: smallest, most likely and largest of each letter."""

    name: Literal["decode", "prefill", "draft"]
    smallest: dict[ShapeLetter, int]
    likely: dict[ShapeLetter, int]
    largest: dict[ShapeLetter, int]

    @model_validator(mode="after")
    def _is_ranges(self) -> TensorRtProfile:
        if not self.smallest.keys() == self.likely.keys() == self.largest.keys():
            raise ValueError("smallest, likely and largest name other letters")
        for letter, least in self.smallest.items():
            if not 1 <= least <= self.likely[letter] <= self.largest[letter]:
                raise ValueError(f"{letter} from {least} to {self.largest[letter]}, most likely {self.likely[letter]}")
        return self


class TensorRtEngine(_Section):
    """A serialized engine."""

    tensor: str
    """Plan tensor, U8: what TensorRT deserializes."""
    profiles: tuple[TensorRtProfile, ...] = Field(min_length=1)
    """In the engine's order."""


class TensorRtKernel(_Section):
    """A CUDA kernel of ours, compiled for one architecture."""

    name: str
    """What it does: `commit_rows`, `gather_rows`, `scatter_rows`."""
    architecture: str = Field(pattern=r"^(sm_[0-9]{2,3}|ptx)$")
    """`sm_80` and so on for a cubin; `ptx` for text the driver compiles for any later architecture."""
    tensor: str
    """Plan tensor, U8: the image."""
    function: str
    """Entry point in the image."""
    num_warps: int = Field(gt=0, le=32)
    shared_bytes: int = Field(ge=0)
    """Dynamic shared memory of a launch."""
    arguments: tuple[str, ...]
    """Types of the arguments in order, Triton's trailing hidden pointers included: `*i64`, `i32`, `fp32` …."""


class TensorRtProgram(_Section):
    """Everything the executor needs to find its way."""

    flavor: Flavor
    half: HalfType
    """What products and attention compute in, and what a pool without a number format of its own holds."""
    model: TensorRtEngine
    attention: TensorRtAttention
    hidden: str | None = None
    """The output float32 [R, d] with what the output head multiplies, if there is one."""
    heads: TensorRtEngine | None = None
    """Medusa heads, an engine of their own; its profile is `draft`."""
    kernels: tuple[TensorRtKernel, ...]
