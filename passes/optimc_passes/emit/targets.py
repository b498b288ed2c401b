"""Every target a recipe can name. To add one: import its lowering here and put it in the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimc.errors import LoweringError
from optimc.plan import KvDtype, KvKeys
from optimc.registry import Registry
from optimc_passes.artifact import Artifact
from optimc_passes.emit import onnxruntime
from optimc_passes.emit.cpu import lower as cpu
from optimc_passes.emit.lowered import Lowered, LoweringOptions
from optimc_passes.emit.tensorrt import options as tensorrt


@dataclass(frozen=True)
class Target:
    """A target: what it cannot do, and its lowering."""

    version: int
    """Changes whenever the same graph lowers to other bytes: plans of an older version are rebuilt."""
    check_options: Callable[[LoweringOptions], dict[str, str]]
    """Return why each option it refuses is refused, by the option's name. Looked at before a weight is read."""
    lower: Callable[[Artifact, LoweringOptions], Lowered]
    """Lower options that have been checked."""
    kv_dtypes: Callable[[LoweringOptions], tuple[KvDtype, ...]]
    """Return what a layer's KV cache may hold."""
    kv_keys: tuple[KvKeys, ...] = ("token", "channel")
    """Whose scale a key in a cache of integers may have."""
    packages: tuple[str, ...] = ()
    """Distributions that shape its plans' bytes beside those that shape all plans."""
    why_not_here: Callable[[LoweringOptions], str | None] = lambda _options: None
    """Return why plans of these options cannot run on the machine that builds them; None if they may."""
    machine: Callable[[LoweringOptions], str | None] = lambda _options: None
    """Return what of the machine that builds them plans depend on; None if they are the same from any."""
    require: Callable[[LoweringOptions], None] = lambda _options: None
    """Raise MissingExtraError or LoweringError where this machine lacks what lowering needs. Looked at before a pass
    runs."""

    def __call__(self, artifact: Artifact, options: LoweringOptions) -> Lowered:
        """Lower the artifact's graph, which must have its weights attached.

        Raises LoweringError for options the target refuses, for a KV cache it has no kernels for, and naming the node
        that has none.
        """
        refused = self.check_options(options)
        for choice in artifact.choices.kv:
            reason = self.refuse_kv(choice.dtype, options) or self.refuse_keys(choice.keys)
            if reason is not None:
                refused["KV cache"] = reason
        if refused:
            raise LoweringError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
        return self.lower(artifact, options)

    def refuse_kv(self, dtype: KvDtype, options: LoweringOptions) -> str | None:
        """Return why no layer's cache can hold `dtype`; None if it can."""
        known = self.kv_dtypes(options)
        if dtype in known:
            return None
        later = f"; {tensorrt.NO_FP8_POOL}" if dtype == "fp8" else ""
        return f"no kernels for keys and values in {dtype}, use one of {', '.join(known)}{later}"

    def refuse_keys(self, keys: KvKeys) -> str | None:
        """Return why keys in a cache of integers cannot have a scale per `keys`; None if they can."""
        if keys in self.kv_keys:
            return None
        return f"no kernels for keys with a scale per {keys}, set keys: {' or '.join(self.kv_keys)}"


def _lower_onnxruntime(artifact: Artifact, options: LoweringOptions) -> Lowered:
    assert artifact.graph is not None, "lowering follows the graph stage"
    int8_activations = bool(options.int8_activations)
    return onnxruntime.lower(
        artifact.graph,
        block_size=options.block_size,
        int8_activations=int8_activations,
        hidden=options.hidden,
        heads=artifact.heads,
    )


def _lower_cpu(artifact: Artifact, options: LoweringOptions) -> Lowered:
    assert artifact.graph is not None, "lowering follows the graph stage"
    return cpu.lower(artifact.graph, options, artifact.choices.kv, artifact.weights, artifact.heads)


def _lower_tensorrt(artifact: Artifact, options: LoweringOptions) -> Lowered:
    # Here, since it imports what only plans for TensorRT need.
    from optimc_passes.emit.tensorrt.lower import lower

    assert artifact.graph is not None, "lowering follows the graph stage"
    return lower(artifact.graph, options, artifact.choices.kv, artifact.heads)


def _registered() -> Registry[Target]:
    registry: Registry[Target] = Registry("target")
    registry.register(cpu.BACKEND, Target(cpu.VERSION, cpu.check_options, _lower_cpu, lambda _: cpu.KV_DTYPES))
    registry.register(
        onnxruntime.BACKEND,
        Target(onnxruntime.VERSION, onnxruntime.check_options, _lower_onnxruntime, lambda _: ("float32",)),
    )
    registry.register(
        tensorrt.BACKEND,
        Target(
            tensorrt.VERSION,
            tensorrt.check_options,
            _lower_tensorrt,
            tensorrt.kv_dtypes,
            kv_keys=("token",),
            packages=tensorrt.PACKAGES,
            why_not_here=tensorrt.why_not_here,
            machine=tensorrt.machine,
            require=tensorrt.require,
        ),
    )
    return registry


TARGETS: Registry[Target] = _registered()
"""Backend name to target."""
