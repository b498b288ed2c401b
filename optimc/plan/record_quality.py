"""Writing what was measured into the plan it was measured on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimc.plan.container import TensorSpec
from optimc.plan.manifest import Manifest, Quality
from optimc.plan.reader import Plan
from optimc.plan.writer import PlanTensor, write_plan


def record_quality(path: Path, quality: Quality) -> Manifest:
    """Put `quality` into the manifest of the plan at `path`, its tensors unchanged; return the new manifest.

    The plan is written anew beside the old one and takes its place at the end. Raises PlanError if it cannot be read,
    or if a tensor is not what its SHA-256 says.
    """
    with Plan.open(path, verify=True) as plan:
        manifest = plan.manifest.model_copy(update={"quality": quality})
        tensors = [PlanTensor(spec.name, spec.dtype, spec.shape, _reader(plan, spec)) for spec in plan]
        return write_plan(path, manifest, tensors)


def _reader(plan: Plan, spec: TensorSpec) -> Callable[[], NDArray[np.generic]]:
    return lambda: plan.tensor(spec.name)
