"""The two TensorRTs a plan can be built with: how each is found, and which GPUs it builds for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from optimc.errors import LoweringError, MissingExtraError
from optimc.plan.tensorrt_program import Flavor


@dataclass(frozen=True)
class TensorRt:
    """One flavor."""

    name: Flavor
    title: str
    """What NVIDIA calls it."""
    module: str
    """What is imported; the API is the same."""
    architectures: tuple[str, ...]
    """GPUs it builds for from anywhere, the ones a plan is for unless the recipe names others; empty: it builds on the
    GPU that serves, and for no other."""

    def load(self) -> ModuleType:
        """Import the module. Raises MissingExtraError if it is not installed, LoweringError if it cannot be loaded."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            purpose = f"building for target tensorrt, flavor {self.name},"
            raise MissingExtraError(self.module, self.name, purpose) from error
        except (ImportError, OSError) as error:  # a library of it, or of the driver, that is not there
            raise LoweringError(f"{self.title} is installed and cannot be loaded: {error}") from error

    def refuse(self, architectures: Sequence[str]) -> str | None:
        """Return why a plan cannot be for these GPUs; None if it can."""
        if not self.architectures:
            return f"{self.title} builds for the GPU it runs on; leave gpu out, or use flavor: rtx"
        unknown = sorted(set(architectures) - set(self.architectures))
        if unknown or not architectures:
            asked, known = ", ".join(unknown) or "no GPU at all", ", ".join(self.architectures)
            return f"{self.title} does not build our graphs for {asked}; it does for {known}"
        twice = sorted({name for name in architectures if architectures.count(name) > 1})
        if twice:
            return f"{', '.join(twice)} is named more than once; name each GPU once"
        return None


RTX = TensorRt("rtx", "TensorRT-RTX", "tensorrt_rtx", ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121"))
"""It also knows sm_75, which has neither bfloat16 nor 4-bit weights, and no data-center GPU later than sm_80."""

FULL = TensorRt("tensorrt", "TensorRT", "tensorrt", ())


def flavor_of(name: Flavor | None) -> TensorRt:
    """Return the flavor a recipe asks for; full TensorRT where it says nothing."""
    return RTX if name == RTX.name else FULL
