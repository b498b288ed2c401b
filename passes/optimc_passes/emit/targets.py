"""Every target a recipe can name. To add one: import its lowering here and put it in the list."""

from __future__ import annotations

from typing import Protocol

from optimc.registry import Registry
from optimc_passes.artifact import Artifact
from optimc_passes.emit import onnxruntime
from optimc_passes.emit.lowered import Lowered


class Target(Protocol):
    """A target's lowering."""

    def __call__(self, artifact: Artifact, *, block_size: int, int8_activations: bool = False) -> Lowered:
        """Lower the artifact's graph, which must have its weights attached.

        `block_size` is S, slots per KV block. `int8_activations` allows products with quantized weights to round
        their activations to 8 bits. Raises LoweringError naming the node that has no kernel on the target.
        """
        ...


def _lower_onnxruntime(artifact: Artifact, *, block_size: int, int8_activations: bool = False) -> Lowered:
    assert artifact.graph is not None, "lowering follows the graph stage"
    return onnxruntime.lower(artifact.graph, block_size=block_size, int8_activations=int8_activations)


def _registered() -> Registry[Target]:
    registry: Registry[Target] = Registry("target")
    registry.register(onnxruntime.BACKEND, _lower_onnxruntime)
    return registry


TARGETS: Registry[Target] = _registered()
"""Backend name to lowering."""
