"""What a recipe asks of its target, in the form lowerings take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimc.recipe import LimitsSpec, TargetSpec

if TYPE_CHECKING:
    from optimc_passes.emit import LoweringOptions

SECTIONS = {
    "block_size": "limits",
    "int8_activations": "target",
    "activation_scales": "target",
    "kv_dtype": "target",
    "max_step_tokens": "limits",
    "max_seqs": "limits",
}
"""Option to the recipe's section that has it as a key of the same name."""


def lowering_options(target: TargetSpec, limits: LimitsSpec) -> LoweringOptions:
    """Gather the options of a lowering."""
    from optimc_passes.emit import LoweringOptions

    return LoweringOptions(
        block_size=limits.block_size,
        int8_activations=target.int8_activations,
        activation_scales=target.activation_scales,
        kv_dtype=target.kv_dtype,
        max_step_tokens=limits.max_step_tokens,
        max_seqs=limits.max_seqs,
    )
