"""Every target a recipe can name. To add one: import its lowering here and put it in the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimc.errors import LoweringError
from optimc.registry import Registry
from optimc_passes.artifact import Artifact
from optimc_passes.emit import onnxruntime
from optimc_passes.emit.cpu import lower as cpu
from optimc_passes.emit.lowered import Lowered, LoweringOptions


@dataclass(frozen=True)
class Target:
    """A target: what it cannot do, and its lowering."""

    version: int
    """Changes whenever the same graph lowers to other bytes: plans of an older version are rebuilt."""
    check_options: Callable[[LoweringOptions], dict[str, str]]
    """Return why each option it refuses is refused, by the option's name. Looked at before a weight is read."""
    lower: Callable[[Artifact, LoweringOptions], Lowered]
    """Lower options that have been checked."""

    def __call__(self, artifact: Artifact, options: LoweringOptions) -> Lowered:
        """Lower the artifact's graph, which must have its weights attached.

        Raises LoweringError for options the target refuses, and naming the node that has no kernel on it.
        """
        refused = self.check_options(options)
        if refused:
            raise LoweringError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
        return self.lower(artifact, options)


def _lower_onnxruntime(artifact: Artifact, options: LoweringOptions) -> Lowered:
    assert artifact.graph is not None, "lowering follows the graph stage"
    int8_activations = bool(options.int8_activations)
    return onnxruntime.lower(artifact.graph, block_size=options.block_size, int8_activations=int8_activations)


def _lower_cpu(artifact: Artifact, options: LoweringOptions) -> Lowered:
    assert artifact.graph is not None, "lowering follows the graph stage"
    return cpu.lower(artifact.graph, options)


def _registered() -> Registry[Target]:
    registry: Registry[Target] = Registry("target")
    registry.register(cpu.BACKEND, Target(cpu.VERSION, cpu.check_options, _lower_cpu))
    registry.register(onnxruntime.BACKEND, Target(onnxruntime.VERSION, onnxruntime.check_options, _lower_onnxruntime))
    return registry


TARGETS: Registry[Target] = _registered()
"""Backend name to target."""
