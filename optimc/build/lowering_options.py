"""What a recipe asks of its target, in the form lowerings take it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optimc.recipe import LimitsSpec, Recipe, TargetSpec

if TYPE_CHECKING:
    from optimc_passes.emit import LoweringOptions

SECTIONS = {
    "block_size": "limits",
    "int8_activations": "target",
    "activation_scales": "target",
    "kv_dtype": "target",
    "max_step_tokens": "limits",
    "max_seqs": "limits",
    "max_seq_len": "limits",
    "flavor": "target",
    "precision": "target",
    "gpu": "target",
    "builder_level": "target",
}
"""Option to the recipe's section that has it as a key of the same name."""


def lowering_options(
    target: TargetSpec, limits: LimitsSpec, *, max_seq_len: int | None = None, cache: Path | None = None
) -> LoweringOptions:
    """Gather the options of a lowering. `max_seq_len` is the model's, where the recipe leaves it open."""
    from optimc_passes.emit import LoweringOptions

    return LoweringOptions(
        block_size=limits.block_size,
        int8_activations=target.int8_activations,
        activation_scales=target.activation_scales,
        kv_dtype=target.kv_dtype,
        max_step_tokens=limits.max_step_tokens,
        max_seqs=limits.max_seqs,
        max_seq_len=max_seq_len if limits.max_seq_len is None else limits.max_seq_len,
        flavor=target.flavor,
        precision=target.precision,
        gpu=target.gpu,
        builder_level=target.builder_level,
        cache=cache,
    )


def require_target(recipe: Recipe) -> None:
    """Raise MissingExtraError or LoweringError where this machine lacks what the recipe's target needs to be built."""
    from optimc_passes.emit import TARGETS

    TARGETS[recipe.target.backend].require(lowering_options(recipe.target, recipe.limits))
