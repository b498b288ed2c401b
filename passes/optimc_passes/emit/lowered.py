"""What every target's lowering takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.plan import KvLayout, PlanTensor
from optimc.plan.kv_layout import KvDtype
from optimc.plan.tensorrt_program import Flavor, HalfType
from optimc.recipe.model import ActivationScales


@dataclass(frozen=True)
class LoweringOptions:
    """What a recipe asks of the engine, beside the graph."""

    block_size: int
    """Slots S per KV block."""
    int8_activations: bool | None
    """Whether products with quantized weights may round their activations to 8 bits; None: the target's own choice."""
    activation_scales: ActivationScales
    """One scale of int8 activations per row and group of the weight, or one per row."""
    kv_dtype: KvDtype | None
    """Dtype of the KV pool; None: the target's own choice. Other than float32, K and V are rounded as they are written,
    integers with a scale per token and head."""
    max_step_tokens: int
    """Most tokens T in one step."""
    max_seqs: int
    """Most sequences B in one step."""
    max_seq_len: int | None = None
    """Longest sequence in tokens; None where the model's configuration has not been read, which says it by default."""
    flavor: Flavor | None = None
    """Which TensorRT; None, as for the next three: the tensorrt target's own choice, and the only one for others."""
    precision: HalfType | None = None
    """What products and attention compute in."""
    gpu: tuple[str, ...] | None = None
    """Architectures the plan is for."""
    builder_level: int | None = None
    """How long kernels are looked for, 0 to 5."""
    hidden: bool = False
    """Whether steps also answer what the output head multiplied; they do wherever there are Medusa heads."""
    cache: Path | None = None
    """Folder for a lowering's files and for what it keeps for the next; None: the system's for temporary files."""


@dataclass(frozen=True)
class Lowered:
    """A model in the form one target runs, ready to be written into a plan."""

    program: dict[str, Any]
    """`Manifest.program`: private to the target, JSON values only."""
    tensors: list[PlanTensor]
    """Program bytes and weights. Each is loaded once, when the plan is written."""
    requirements: dict[str, str]
    """`TargetInfo.requirements`: what the machine that serves must have."""
    kv: KvLayout
